"""Transactions (KIP-98). `gateway/coordinator/transactions.py` decides what a producer may do next."""
