package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"compat"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

var balancers = map[string]func() kgo.GroupBalancer{
	"range":              kgo.RangeBalancer,
	"roundrobin":         kgo.RoundRobinBalancer,
	"sticky":             kgo.StickyBalancer,
	"cooperative-sticky": kgo.CooperativeStickyBalancer,
}

// serverSide, in place of an assignor, selects the consumer protocol, whose members have no assignors.
const serverSide = "consumer"

const pollRecords = 200

// consumer is a member of a group. A rebalance waits until the member has processed the records that it has polled. So
// the commit in its revoke callback covers exactly the records that it has processed.
type consumer struct {
	*compat.Ownership
	client *kgo.Client
	stop   context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	topics []string
	closed bool
	err    error
}

// options returns options with short times, so that a scenario ends soon.
func options() []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(compat.Bootstrap()),
		kgo.ClientID("compat"),
		kgo.MetadataMaxAge(time.Second),
		kgo.MetadataMinAge(100 * time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }),
		// The gateway requires no authentication. By default kgo takes an EOF on a connection's first request for
		// missing SASL or TLS, and does not retry.
		kgo.AlwaysRetryEOF(),
	}
	if os.Getenv("COMPAT_DEBUG") != "" {
		opts = append(opts, kgo.WithLogger(kgo.BasicLogger(os.Stderr, kgo.LogLevelDebug, nil)))
	}
	return opts
}

func join(wanted compat.Options, sink compat.Sink) (compat.Consumer, error) {
	c := &consumer{
		Ownership: compat.NewOwnership(wanted.Name, sink), done: make(chan struct{}), topics: wanted.Topics,
	}
	opts := append(options(),
		kgo.ConsumerGroup(wanted.Group),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(wanted.SessionTimeout()),
		kgo.RebalanceTimeout(10*time.Second),
		kgo.HeartbeatInterval(300*time.Millisecond),
		kgo.FetchMaxWait(250*time.Millisecond),
		kgo.BlockRebalanceOnPoll(),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, assigned map[string][]int32) {
			each(assigned, c.Assigned)
		}),
		kgo.OnPartitionsRevoked(func(ctx context.Context, client *kgo.Client, revoked map[string][]int32) {
			if err := client.CommitUncommittedOffsets(ctx); err != nil {
				fmt.Fprintf(os.Stderr, "%s: commit in revoke: %v\n", wanted.Name, err)
			}
			each(revoked, c.Revoked)
		}),
		kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, lost map[string][]int32) {
			each(lost, c.Lost)
		}),
	)
	if wanted.Pattern != "" {
		opts = append(opts, kgo.ConsumeRegex(), kgo.ConsumeTopics(wanted.Pattern))
	} else {
		opts = append(opts, kgo.ConsumeTopics(wanted.Topics...))
	}
	if wanted.Instance != "" {
		opts = append(opts, kgo.InstanceID(wanted.Instance))
	}
	if wanted.Commit == compat.CommitInRevoke {
		opts = append(opts, kgo.DisableAutoCommit())
	} else {
		opts = append(opts, kgo.AutoCommitInterval(500*time.Millisecond))
	}
	if slices.Equal(wanted.Assignors, []string{serverSide}) {
		opts = append(opts, kgo.ServerSideBalancer())
	} else {
		var chosen []kgo.GroupBalancer
		for _, name := range wanted.Assignors {
			chosen = append(chosen, balancers[name]())
		}
		opts = append(opts, kgo.Balancers(chosen...))
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	c.client, c.stop = client, stop
	go c.poll(ctx, wanted.Name)
	return c, nil
}

func each(partitions map[string][]int32, do func(string, int32)) {
	for topic, indexes := range partitions {
		for _, index := range indexes {
			do(topic, index)
		}
	}
}

func (c *consumer) poll(ctx context.Context, name string) {
	defer close(c.done)
	for {
		fetches := c.client.PollRecords(ctx, pollRecords)
		if ctx.Err() != nil || fetches.IsClientClosed() {
			c.deliver(fetches)
			c.client.AllowRebalance()
			return
		}
		fetches.EachError(func(topic string, partition int32, err error) {
			fmt.Fprintf(os.Stderr, "%s: %s-%d: %v\n", name, topic, partition, err)
			if errors.Is(err, kerr.FencedInstanceID) {
				c.mu.Lock()
				c.err = fmt.Errorf("%w: %w", compat.ErrFenced, err)
				c.mu.Unlock()
			}
			if errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kerr.UnknownTopicID) {
				// kgo leaves it to the application to stop consuming a deleted topic.
				c.client.PurgeTopicsFromConsuming(topic)
			}
		})
		c.deliver(fetches)
		c.client.AllowRebalance()
	}
}

// deliver reports records as delivered. An interrupted poll may also return records. These are delivered too, because
// kgo counts them as polled and would commit their offsets.
func (c *consumer) deliver(fetches kgo.Fetches) {
	fetches.EachRecord(func(record *kgo.Record) { c.Delivered(record.Topic, record.Partition, record.Offset) })
}

func (c *consumer) Generation() int32 {
	_, generation := c.client.GroupMetadata()
	return generation
}

func (c *consumer) MemberID() string {
	member, _ := c.client.GroupMetadata()
	return member
}

func (c *consumer) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *consumer) SetTopics(topics []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var dropped []string
	for _, topic := range c.topics {
		if !slices.Contains(topics, topic) {
			dropped = append(dropped, topic)
		}
	}
	c.topics = topics
	c.client.AddConsumeTopics(topics...)
	if len(dropped) > 0 {
		c.client.PurgeTopicsFromConsuming(dropped...)
	}
}

func (c *consumer) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	c.stop()
	<-c.done
	c.client.CloseAllowingRebalance()
	c.Ended("closed")
	return nil
}
