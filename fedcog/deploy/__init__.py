"""A federation of real machines on Flower: project files, certificates, apps."""
