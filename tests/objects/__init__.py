"""Records in a bucket of a real S3 server, built from its Go module and run as a process of the test."""
