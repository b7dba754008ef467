"""The search for the settings that pay, by replay and live."""
