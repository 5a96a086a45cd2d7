"""The two halves of a federation, as Flower runs them: one at the server, one at every node."""

from fedcog.deploy.apps import client_app, server_app

server = server_app()
client = client_app()
