"""The machine as data: devices by name and what they can do, links, what detects or measures one, kinds joined."""
