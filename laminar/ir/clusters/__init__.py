"""The machine as data: what devices can do, links that join them, machines people have, kinds of device joined."""
