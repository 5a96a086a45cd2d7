"""The two apps of a federation, as Flower runs them: one on the server, one on every node."""

from fedcog.deploy.apps import client_app, server_app

server = server_app()
client = client_app()
