package main

import (
	"fmt"
	"os"
	"time"

	"github.com/IBM/sarama"
)

type quiet struct{}

func (quiet) Print(...any)          {}
func (quiet) Printf(string, ...any) {}
func (quiet) Println(...any)        {}

type verbose struct{}

func (verbose) Print(arguments ...any) { fmt.Fprint(os.Stderr, arguments...) }
func (verbose) Printf(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05.000 ")+format, arguments...)
}
func (verbose) Println(arguments ...any) { fmt.Fprintln(os.Stderr, arguments...) }

var strategies = map[string]func() sarama.BalanceStrategy{
	"range":              sarama.NewBalanceStrategyRange,
	"roundrobin":         sarama.NewBalanceStrategyRoundRobin,
	"sticky":             sarama.NewBalanceStrategySticky,
	"cooperative-sticky": sarama.NewBalanceStrategyCooperativeSticky,
}

// newConfig returns a configuration with short times, so that a scenario ends soon, and with retries that outlast a
// restart of the gateway.
func newConfig(version sarama.KafkaVersion) *sarama.Config {
	config := sarama.NewConfig()
	config.ClientID = "compat"
	config.Version = version
	config.Metadata.RefreshFrequency = time.Second
	config.Metadata.Retry.Max = 40
	config.Metadata.Retry.Backoff = 100 * time.Millisecond
	// Sarama's metadata requests would otherwise create a deleted topic again.
	config.Metadata.AllowAutoTopicCreation = false
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.Return.Errors = true
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.Retry.Max = 40
	config.Producer.Retry.Backoff = 100 * time.Millisecond
	config.Consumer.Return.Errors = true
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.MaxWaitTime = 100 * time.Millisecond
	config.Consumer.Retry.Backoff = 100 * time.Millisecond
	config.Consumer.Offsets.AutoCommit.Interval = 500 * time.Millisecond
	config.Consumer.Group.Heartbeat.Interval = 300 * time.Millisecond
	config.Consumer.Group.Rebalance.Timeout = 10 * time.Second
	config.Consumer.Group.Rebalance.Retry.Max = 40
	config.Consumer.Group.Rebalance.Retry.Backoff = 100 * time.Millisecond
	return config
}
