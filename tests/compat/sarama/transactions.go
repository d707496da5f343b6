package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"compat"

	"github.com/IBM/sarama"
)

// transactional is Sarama's producer with a transactional id.
type transactional struct{ producer sarama.SyncProducer }

func (c *client) Transactional(_ context.Context, id string, timeout time.Duration) (compat.TransactionalProducer, error) {
	producer, err := c.transactionalProducer(id, timeout)
	if err != nil {
		return nil, err
	}
	return &transactional{producer}, nil
}

func (c *client) transactionalProducer(id string, timeout time.Duration) (sarama.SyncProducer, error) {
	config := newConfig(c.version)
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1 // Sarama requires this for idempotence
	config.Producer.Transaction.ID = id
	config.Producer.Transaction.Timeout = timeout
	config.Producer.Transaction.Retry.Backoff = 100 * time.Millisecond
	return sarama.NewSyncProducer([]string{compat.Bootstrap()}, config)
}

func (p *transactional) Begin() error { return told(p.producer.BeginTxn()) }

func (p *transactional) Send(_ context.Context, partition compat.Partition, values ...string) error {
	return sendAll(p.producer, partition, values)
}

func sendAll(producer sarama.SyncProducer, partition compat.Partition, values []string) error {
	var messages []*sarama.ProducerMessage
	for _, value := range values {
		messages = append(messages, &sarama.ProducerMessage{
			Topic: partition.Topic, Partition: partition.Index, Value: sarama.StringEncoder(value),
		})
	}
	err := producer.SendMessages(messages)
	var failed sarama.ProducerErrors
	if errors.As(err, &failed) {
		err = failed[0].Err
	}
	return told(err)
}

func (p *transactional) Commit(context.Context) error { return told(p.producer.CommitTxn()) }

func (p *transactional) Abort(context.Context) error { return told(p.producer.AbortTxn()) }

func (p *transactional) Close() { _ = p.producer.Close() }

func told(err error) error {
	if errors.Is(err, sarama.ErrProducerFenced) || errors.Is(err, sarama.ErrInvalidProducerEpoch) {
		return fmt.Errorf("%w: %w", compat.ErrProducerFenced, err)
	}
	return err
}

// reader is Sarama's consumer of one partition. It has a client of its own, because the isolation level is a setting of
// the client.
type reader struct {
	consumer  sarama.Consumer
	partition sarama.PartitionConsumer
}

func (c *client) Reader(partition compat.Partition, readCommitted bool) (compat.Reader, error) {
	config := newConfig(c.version)
	if readCommitted {
		config.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	consumer, err := sarama.NewConsumer([]string{compat.Bootstrap()}, config)
	if err != nil {
		return nil, err
	}
	opened, err := consumer.ConsumePartition(partition.Topic, partition.Index, sarama.OffsetOldest)
	if err != nil {
		return nil, errors.Join(err, consumer.Close())
	}
	return &reader{consumer, opened}, nil
}

func (r *reader) Read(ctx context.Context, count int, within time.Duration) ([]compat.Message, error) {
	late := time.After(within)
	var messages []compat.Message
	for len(messages) < count {
		select {
		case read := <-r.partition.Messages():
			messages = append(messages, compat.Message{Offset: read.Offset, Value: read.Value})
		case err := <-r.partition.Errors():
			return messages, err
		case <-late:
			return messages, nil
		case <-ctx.Done():
			return messages, ctx.Err()
		}
	}
	return messages, nil
}

func (r *reader) Close() {
	_ = r.partition.Close()
	_ = r.consumer.Close()
}

// transformer is Sarama's consumer group, which marks no messages, and a transactional producer.
type transformer struct {
	name     string
	group    sarama.ConsumerGroup
	producer sarama.SyncProducer
	records  chan *sarama.ConsumerMessage
	stop     context.CancelFunc
	done     chan struct{}

	mu        sync.Mutex
	session   sarama.ConsumerGroupSession
	positions map[string]map[int32]int64
}

func (c *client) Transformer(_ context.Context, id, group, topic string) (compat.Transformer, error) {
	producer, err := c.transactionalProducer(id, time.Minute)
	if err != nil {
		return nil, err
	}
	config := newConfig(c.version)
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	config.Consumer.Offsets.AutoCommit.Enable = false
	joined, err := sarama.NewConsumerGroup([]string{compat.Bootstrap()}, group, config)
	if err != nil {
		return nil, errors.Join(err, producer.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &transformer{
		name: group, group: joined, producer: producer, records: make(chan *sarama.ConsumerMessage), stop: stop,
		done: make(chan struct{}), positions: map[string]map[int32]int64{},
	}
	go func() {
		for err := range joined.Errors() {
			fmt.Fprintf(os.Stderr, "%s: %v\n", group, err)
		}
	}()
	go func() {
		defer close(s.done)
		for ctx.Err() == nil {
			if err := joined.Consume(ctx, []string{topic}, s); err != nil {
				fmt.Fprintf(os.Stderr, "%s: %v\n", group, err)
				time.Sleep(100 * time.Millisecond)
			}
		}
	}()
	return s, nil
}

// Setup is called by Sarama when a session has begun.
func (s *transformer) Setup(session sarama.ConsumerGroupSession) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = session
	return nil
}

// Cleanup is called by Sarama at the end of a session. Nothing is left to do.
func (s *transformer) Cleanup(sarama.ConsumerGroupSession) error { return nil }

// ConsumeClaim is called by Sarama for each assigned partition. It passes the partition's records to Read.
func (s *transformer) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		select {
		case s.records <- message:
		case <-session.Context().Done():
			return nil
		}
	}
	return nil
}

func (s *transformer) Read(ctx context.Context, count int, within time.Duration) ([]compat.GroupRecord, error) {
	late := time.After(within)
	var found []compat.GroupRecord
	for len(found) < count {
		select {
		case read := <-s.records:
			found = append(found, compat.GroupRecord{
				Partition: compat.Partition{Topic: read.Topic, Index: read.Partition},
				Message:   compat.Message{Offset: read.Offset, Value: read.Value},
			})
			if s.positions[read.Topic] == nil {
				s.positions[read.Topic] = map[int32]int64{}
			}
			s.positions[read.Topic][read.Partition] = read.Offset + 1
		case <-late:
			return found, nil
		case <-ctx.Done():
			return found, ctx.Err()
		}
	}
	return found, nil
}

func (s *transformer) Begin() error { return told(s.producer.BeginTxn()) }

func (s *transformer) Send(_ context.Context, partition compat.Partition, values ...string) error {
	return sendAll(s.producer, partition, values)
}

func (s *transformer) End(_ context.Context, commit bool) (bool, error) {
	offsets := map[string][]*sarama.PartitionOffsetMetadata{}
	for topic, positions := range s.positions {
		for partition, offset := range positions {
			offsets[topic] = append(offsets[topic], &sarama.PartitionOffsetMetadata{
				Partition: partition, Offset: offset, LeaderEpoch: -1,
			})
		}
	}
	s.mu.Lock()
	metadata := sarama.NewConsumerGroupMetadataFromSession(s.session, s.name, nil)
	s.mu.Unlock()
	if err := s.producer.AddOffsetsToTxnWithGroupMetadata(offsets, metadata); err != nil {
		return false, told(err)
	}
	if commit {
		err := told(s.producer.CommitTxn())
		return err == nil, err
	}
	return false, told(s.producer.AbortTxn())
}

func (s *transformer) Close() {
	s.stop()
	_ = s.group.Close()
	<-s.done
	_ = s.producer.Close()
}

func (c *client) StableEnd(_ context.Context, partition compat.Partition) (int64, error) {
	listed, err := c.admin.ListOffsets(
		map[string]map[int32]int64{partition.Topic: {partition.Index: sarama.OffsetNewest}},
		&sarama.ListOffsetsOptions{IsolationLevel: sarama.ReadCommitted},
	)
	if err != nil {
		return 0, err
	}
	found := listed[partition.Topic][partition.Index]
	if found == nil {
		return 0, fmt.Errorf("no answer for %s", partition)
	}
	if !errors.Is(found.Err, sarama.ErrNoError) {
		return 0, found.Err
	}
	return found.Offset, nil
}
