"""Transactions (KIP-98). What a producer may do next is decided in `gateway/coordinator/transactions.py`."""
