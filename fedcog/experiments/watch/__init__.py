"""A page that shows runs while they are carried out: served to this machine alone, from run files, changing none."""

from fedcog.experiments.watch.server import Server

__all__ = ["Server"]
