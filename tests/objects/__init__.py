"""Records in a bucket of a real S3 server. The server is built from its Go module and runs as a process of the test."""
