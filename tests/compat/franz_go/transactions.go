package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"compat"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const callLimit = 20 * time.Second

func transacting(id string, timeout time.Duration) []kgo.Opt {
	return append(producing(), kgo.TransactionalID(id), kgo.TransactionTimeout(timeout))
}

// transactional is kgo's client as a transactional producer.
type transactional struct{ kafka *kgo.Client }

func (c *client) Transactional(ctx context.Context, id string, timeout time.Duration) (compat.TransactionalProducer, error) {
	kafka, err := kgo.NewClient(transacting(id, timeout)...)
	if err != nil {
		return nil, err
	}
	// kgo requests a producer id with the first record, unless the application asks for the producer id before.
	if _, _, err := kafka.ProducerID(ctx); err != nil {
		kafka.Close()
		return nil, err
	}
	return &transactional{kafka}, nil
}

func (p *transactional) Begin() error { return told(p.kafka.BeginTransaction()) }

func (p *transactional) Send(ctx context.Context, partition compat.Partition, values ...string) error {
	return sendAll(ctx, p.kafka.ProduceSync, partition, values)
}

func sendAll(
	ctx context.Context,
	produce func(context.Context, ...*kgo.Record) kgo.ProduceResults,
	partition compat.Partition,
	values []string,
) error {
	var records []*kgo.Record
	for _, value := range values {
		records = append(records, &kgo.Record{Topic: partition.Topic, Partition: partition.Index, Value: []byte(value)})
	}
	return told(produce(ctx, records...).FirstErr())
}

func (p *transactional) Commit(ctx context.Context) error {
	return told(p.kafka.EndTransaction(ctx, kgo.TryCommit))
}

func (p *transactional) Abort(ctx context.Context) error {
	return told(p.kafka.EndTransaction(ctx, kgo.TryAbort))
}

func (p *transactional) Close() { p.kafka.Close() }

func told(err error) error {
	if errors.Is(err, kerr.ProducerFenced) || errors.Is(err, kerr.InvalidProducerEpoch) {
		return fmt.Errorf("%w: %w", compat.ErrProducerFenced, err)
	}
	return err
}

// reader is kgo's client as a consumer of one partition.
type reader struct{ kafka *kgo.Client }

func (c *client) Reader(partition compat.Partition, readCommitted bool) (compat.Reader, error) {
	isolation := kgo.ReadUncommitted()
	if readCommitted {
		isolation = kgo.ReadCommitted()
	}
	kafka, err := kgo.NewClient(append(options(),
		kgo.FetchIsolationLevel(isolation),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{
			partition.Topic: {partition.Index: kgo.NewOffset().AtStart()},
		}),
	)...)
	return &reader{kafka}, err
}

func (r *reader) Read(ctx context.Context, count int, within time.Duration) ([]compat.Message, error) {
	records, err := poll(ctx, r.kafka.PollRecords, count, within)
	var messages []compat.Message
	for _, record := range records {
		messages = append(messages, compat.Message{Offset: record.Offset, Value: record.Value})
	}
	return messages, err
}

func (r *reader) Close() { r.kafka.Close() }

// poll returns the next `count` records, or fewer without an error if they do not arrive in time.
func poll(
	ctx context.Context, pollRecords func(context.Context, int) kgo.Fetches, count int, within time.Duration,
) ([]*kgo.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var records []*kgo.Record
	for len(records) < count && ctx.Err() == nil {
		fetches := pollRecords(ctx, count-len(records))
		records = append(records, fetches.Records()...)
		if err := fetches.Err(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return records, err
		}
	}
	return records, nil
}

// transformer is kgo's GroupTransactSession, which combines a group member with a transactional producer.
type transformer struct{ session *kgo.GroupTransactSession }

func (c *client) Transformer(_ context.Context, id, group, topic string) (compat.Transformer, error) {
	session, err := kgo.NewGroupTransactSession(append(transacting(id, time.Minute),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.RequireStableFetchOffsets(),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(6*time.Second),
		kgo.RebalanceTimeout(10*time.Second),
		kgo.HeartbeatInterval(300*time.Millisecond),
	)...)
	if err != nil {
		return nil, err
	}
	return &transformer{session}, nil
}

func (s *transformer) Read(ctx context.Context, count int, within time.Duration) ([]compat.GroupRecord, error) {
	records, err := poll(ctx, s.session.PollRecords, count, within)
	var found []compat.GroupRecord
	for _, record := range records {
		found = append(found, compat.GroupRecord{
			Partition: compat.Partition{Topic: record.Topic, Index: record.Partition},
			Message:   compat.Message{Offset: record.Offset, Value: record.Value},
		})
	}
	return found, err
}

func (s *transformer) Begin() error { return told(s.session.Begin()) }

func (s *transformer) Send(ctx context.Context, partition compat.Partition, values ...string) error {
	return sendAll(ctx, s.session.ProduceSync, partition, values)
}

func (s *transformer) End(ctx context.Context, commit bool) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	committed, err := s.session.End(ctx, kgo.TransactionEndTry(commit))
	return committed, told(err)
}

func (s *transformer) Close() { s.session.Close() }

func (c *client) StableEnd(ctx context.Context, partition compat.Partition) (int64, error) {
	listed, err := c.admin.ListCommittedOffsets(ctx, partition.Topic)
	if err != nil {
		return 0, err
	}
	offset, found := listed.Lookup(partition.Topic, partition.Index)
	if !found {
		return 0, fmt.Errorf("no answer for %s", partition)
	}
	return offset.Offset, offset.Err
}
