"""Plug-ins for frameworks that train and sample, each through that framework's own plug-in points."""
