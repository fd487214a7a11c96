"""The machine as data: device presets by name, links, what detects or measures one, kinds joined."""
