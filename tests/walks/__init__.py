"""Walks: what four people do with Sluice for the first time, by the commands that the pages tell them.

A tester wants a green test, a newcomer two consumers, an operator an alert, a migrator consumers that resume. Each walk
runs the blocks of its page as they stand there, with other ports.
"""
