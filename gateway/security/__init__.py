"""Who a connection's peer is, and how its bytes are kept from others."""
