"""aiokafka: the asyncio client."""
