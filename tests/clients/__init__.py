"""Stock clients against a real gateway process, black box."""
