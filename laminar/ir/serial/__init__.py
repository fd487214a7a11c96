"""Values as JSON and back: identities, reading what people may have edited, frozen dataclasses by their annotations."""
