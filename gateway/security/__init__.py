"""Who a connection's peer is, what it may do to which resource, and how its bytes are kept from others."""
