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

	"github.com/IBM/sarama"
)

// consumer is a member of a group. It owns the partitions for which a ConsumeClaim goroutine runs. Sarama starts one
// such goroutine per partition and ends it when the partition is revoked, with eager and with cooperative assignors.
type consumer struct {
	*compat.Ownership
	group  sarama.ConsumerGroup
	commit compat.Commit
	done   chan struct{}
	stop   context.CancelFunc
	ctx    context.Context

	mu      sync.Mutex
	topics  []string
	cancel  context.CancelFunc // ends the running Consume
	session sarama.ConsumerGroupSession
	setups  int
	err     error
}

var errClosed = errors.New("closed")

func joinAt(version sarama.KafkaVersion) compat.JoinFunc {
	return func(options compat.Options, sink compat.Sink) (compat.Consumer, error) {
		config := newConfig(version)
		config.Consumer.Group.InstanceId = options.Instance
		config.Consumer.Group.Session.Timeout = options.SessionTimeout()
		config.Consumer.Offsets.AutoCommit.Enable = options.Commit != compat.CommitInRevoke
		config.Consumer.Group.Rebalance.GroupStrategies = nil
		for _, name := range options.Assignors {
			config.Consumer.Group.Rebalance.GroupStrategies = append(
				config.Consumer.Group.Rebalance.GroupStrategies, strategies[name](),
			)
		}
		group, err := sarama.NewConsumerGroup([]string{compat.Bootstrap()}, options.Group, config)
		if err != nil {
			return nil, err
		}
		return consume(group, options, sink), nil
	}
}

func consume(group sarama.ConsumerGroup, options compat.Options, sink compat.Sink) *consumer {
	ctx, stop := context.WithCancel(context.Background())
	c := &consumer{
		Ownership: compat.NewOwnership(options.Name, sink), group: group, commit: options.Commit,
		done: make(chan struct{}), ctx: ctx, stop: stop, topics: options.Topics,
	}
	go func() {
		for err := range group.Errors() {
			fmt.Fprintf(os.Stderr, "%s: %v\n", options.Name, err)
			c.ended(err)
		}
	}()
	go c.loop(options.Name)
	return c
}

// loop calls Consume again and again, because Consume returns at each eager rebalance and when the gateway is down.
func (c *consumer) loop(name string) {
	defer close(c.done)
	for c.ctx.Err() == nil {
		c.mu.Lock()
		topics := c.topics
		ctx, cancel := context.WithCancel(c.ctx)
		c.cancel = cancel
		c.mu.Unlock()
		err := c.group.Consume(ctx, topics, c)
		cancel()
		switch {
		case err == nil:
			continue
		case errors.Is(err, sarama.ErrClosedConsumerGroup):
			return
		case errors.Is(err, sarama.ErrUnknownTopicOrPartition) && len(topics) > 1:
			// Sarama leaves it to the application to unsubscribe from a deleted topic.
			c.dropUnknown(topics)
		}
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		if c.ended(err) {
			return
		}
		select {
		case <-c.ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// ended records an error that ends the consumer for good, and returns whether `err` is such an error.
func (c *consumer) ended(err error) bool {
	switch {
	case errors.Is(err, sarama.ErrFencedInstancedId):
		err = fmt.Errorf("%w: %w", compat.ErrFenced, err)
	case !errors.Is(err, sarama.ErrInconsistentGroupProtocol):
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	return true
}

func (c *consumer) dropUnknown(topics []string) {
	client, err := newClient(newest)
	if err != nil {
		return // the gateway is down: the next turn of the loop tries again
	}
	defer client.Close()
	var known []string
	for _, topic := range topics {
		if count, err := client.Partitions(c.ctx, topic); err != nil || count > 0 {
			known = append(known, topic)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if slices.Equal(c.topics, topics) && len(known) > 0 {
		c.topics = known
	}
}

// Setup is called by Sarama when a session has begun.
func (c *consumer) Setup(session sarama.ConsumerGroupSession) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = session
	c.setups++
	return nil
}

// Cleanup is called by Sarama after every ConsumeClaim of the session has returned.
func (c *consumer) Cleanup(session sarama.ConsumerGroupSession) error {
	if c.commit == compat.CommitInRevoke {
		session.Commit()
	}
	return nil
}

// ConsumeClaim is called by Sarama for each assigned partition. The member owns the partition until Messages ends.
func (c *consumer) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	c.Assigned(claim.Topic(), claim.Partition())
	defer c.Revoked(claim.Topic(), claim.Partition())
	for message := range claim.Messages() {
		c.Delivered(message.Topic, message.Partition, message.Offset)
		session.MarkMessage(message, "")
	}
	if c.commit == compat.CommitInRevoke {
		session.Commit()
	}
	return nil
}

func (c *consumer) Generation() int32 {
	if session := c.current(); session != nil {
		return session.GenerationID()
	}
	return -1
}

func (c *consumer) MemberID() string {
	if session := c.current(); session != nil {
		return session.MemberID()
	}
	return ""
}

func (c *consumer) current() sarama.ConsumerGroupSession {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session
}

// Setups returns the number of sessions that have begun.
func (c *consumer) Setups() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.setups
}

func (c *consumer) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(c.err, errClosed) {
		return nil
	}
	return c.err
}

// SetTopics ends the running Consume. The next Consume subscribes to the new topics with the same member id.
func (c *consumer) SetTopics(topics []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.topics = topics
	if c.cancel != nil {
		c.cancel()
	}
}

func (c *consumer) Close() error {
	c.mu.Lock()
	closed := errors.Is(c.err, errClosed)
	c.err = errClosed
	c.mu.Unlock()
	if closed {
		return nil
	}
	c.stop()
	err := c.group.Close()
	<-c.done
	c.Ended("closed")
	return err
}
