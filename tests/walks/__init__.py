"""Walks: the first steps of four kinds of users, with the commands of the documentation.

The tester's goal is a passing test, the newcomer's two consumers, the operator's an alert, and the migrator's consumers
that resume. Each walk runs the code blocks of its page unchanged, except for the ports.
"""
