"""Handlers of groups: their members, their committed offsets and their coordinators."""
