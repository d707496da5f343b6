package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"compat"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

var codecs = map[string]kgo.CompressionCodec{
	"none":   kgo.NoCompression(),
	"gzip":   kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(),
	"lz4":    kgo.Lz4Compression(),
	"zstd":   kgo.ZstdCompression(),
}

// client implements the interfaces of package compat with kgo and kadm.
type client struct {
	kafka *kgo.Client
	admin *kadm.Client
}

func newClient() (*client, error) {
	kafka, err := kgo.NewClient(producing()...)
	if err != nil {
		return nil, err
	}
	return &client{kafka, kadm.NewClient(kafka)}, nil
}

func producing() []kgo.Opt {
	return append(options(), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(0))
}

func (c *client) Close() { c.kafka.Close() }

func (c *client) Produce(ctx context.Context, partition compat.Partition, value []byte) (int64, error) {
	record := &kgo.Record{Topic: partition.Topic, Partition: partition.Index, Value: value}
	stored, err := c.kafka.ProduceSync(ctx, record).First()
	if err != nil {
		return 0, err
	}
	return stored.Offset, nil
}

func (c *client) ProduceAll(
	ctx context.Context, codec string, partition compat.Partition, messages []compat.Message,
) error {
	producer, err := kgo.NewClient(append(producing(),
		kgo.ProducerBatchCompression(codecs[codec]), kgo.ProducerLinger(50*time.Millisecond),
	)...)
	if err != nil {
		return err
	}
	defer producer.Close()
	var records []*kgo.Record
	for _, message := range messages {
		record := &kgo.Record{
			Topic: partition.Topic, Partition: partition.Index, Key: message.Key, Value: message.Value,
		}
		if message.TimestampMS != 0 {
			record.Timestamp = time.UnixMilli(message.TimestampMS)
		}
		for _, header := range message.Headers {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: header.Key, Value: header.Value})
		}
		records = append(records, record)
	}
	return producer.ProduceSync(ctx, records...).FirstErr()
}

func (c *client) ProduceIdempotent(
	ctx context.Context, dial compat.DialFunc, partition compat.Partition, values []string,
) error {
	// Idempotence is kgo's default, with five requests in flight per connection.
	producer, err := kgo.NewClient(append(producing(), kgo.Dialer(dial), kgo.ProducerBatchMaxBytes(1000))...)
	if err != nil {
		return err
	}
	defer producer.Close()
	var records []*kgo.Record
	for _, value := range values {
		records = append(records, &kgo.Record{Topic: partition.Topic, Partition: partition.Index, Value: []byte(value)})
	}
	return producer.ProduceSync(ctx, records...).FirstErr()
}

func (c *client) Read(
	ctx context.Context, partition compat.Partition, offset int64, count int,
) ([]compat.Message, error) {
	reader, err := kgo.NewClient(append(options(),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{
			partition.Topic: {partition.Index: kgo.NewOffset().At(offset)},
		}),
	)...)
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	var messages []compat.Message
	for len(messages) < count {
		fetches := reader.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return messages, fmt.Errorf("%d of %d records: %w", len(messages), count, err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			message := compat.Message{
				Offset: record.Offset, TimestampMS: record.Timestamp.UnixMilli(), Key: record.Key, Value: record.Value,
			}
			for _, header := range record.Headers {
				message.Headers = append(message.Headers, compat.RecordHeader{Key: header.Key, Value: header.Value})
			}
			messages = append(messages, message)
		})
	}
	return messages, nil
}

func (c *client) OffsetAt(ctx context.Context, partition compat.Partition, timestampMS int64) (int64, error) {
	var listed kadm.ListedOffsets
	var err error
	switch timestampMS {
	case compat.Earliest:
		listed, err = c.admin.ListStartOffsets(ctx, partition.Topic)
	case compat.Latest:
		listed, err = c.admin.ListEndOffsets(ctx, partition.Topic)
	default:
		listed, err = c.admin.ListOffsetsAfterMilli(ctx, timestampMS, partition.Topic)
	}
	if err != nil {
		return 0, err
	}
	offset, found := listed.Lookup(partition.Topic, partition.Index)
	if !found {
		return 0, fmt.Errorf("no answer for %s", partition)
	}
	return offset.Offset, offset.Err
}

func (c *client) CreateTopic(ctx context.Context, topic string, partitions int) error {
	_, err := c.admin.CreateTopic(ctx, int32(partitions), 1, nil, topic)
	return err
}

func (c *client) Partitions(ctx context.Context, topic string) (int, error) {
	listed, err := c.admin.ListTopics(ctx, topic)
	if err != nil {
		return 0, err
	}
	detail := listed[topic]
	if errors.Is(detail.Err, kerr.UnknownTopicOrPartition) {
		return 0, nil
	}
	return len(detail.Partitions), detail.Err
}

func (c *client) AddPartitions(ctx context.Context, topic string, total int) error {
	answers, err := c.admin.UpdatePartitions(ctx, total, topic)
	if err != nil {
		return err
	}
	if err := answers.Error(); err != nil {
		return err
	}
	return c.learn(ctx, topic, int32(total-1))
}

// learn waits until kgo knows a new partition of a topic that it produces to. Until kgo has refreshed its metadata, it
// refuses records for that partition, and a member may own the partition before that.
func (c *client) learn(ctx context.Context, topic string, partition int32) error {
	if leader, _, err := c.kafka.PartitionLeader(topic, 0); err != nil || leader < 0 {
		return nil
	}
	for {
		if leader, _, err := c.kafka.PartitionLeader(topic, partition); err == nil && leader >= 0 {
			return nil
		}
		c.kafka.ForceMetadataRefresh()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (c *client) DeleteTopic(ctx context.Context, topic string) error {
	_, err := c.admin.DeleteTopic(ctx, topic)
	return err
}

func (c *client) DeleteRecords(ctx context.Context, partition compat.Partition, before int64) error {
	answers, err := c.admin.DeleteRecords(ctx, offsets(partition, before))
	if err != nil {
		return err
	}
	return answers.Error()
}

func offsets(partition compat.Partition, offset int64) kadm.Offsets {
	var offsets kadm.Offsets
	offsets.AddOffset(partition.Topic, partition.Index, offset, -1)
	return offsets
}

func (c *client) TopicConfig(ctx context.Context, topic string) (map[string]string, error) {
	described, err := c.admin.DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return nil, err
	}
	resource, err := described.On(topic, nil)
	if err != nil {
		return nil, err
	}
	values := map[string]string{}
	for _, config := range resource.Configs {
		values[config.Key] = config.MaybeValue()
	}
	return values, resource.Err
}

func (c *client) SetTopicConfig(ctx context.Context, topic, name, value string) error {
	answers, err := c.admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{{Name: name, Value: &value}}, topic)
	if err != nil {
		return err
	}
	answer, err := answers.On(topic, nil)
	if err != nil {
		return err
	}
	return answer.Err
}

func (c *client) Groups(ctx context.Context) ([]string, error) {
	listed, err := c.admin.ListGroups(ctx)
	return listed.Groups(), err
}

func (c *client) DescribeGroup(ctx context.Context, group string) (compat.Group, error) {
	described, err := c.admin.DescribeGroups(ctx, group)
	if err != nil {
		return compat.Group{}, err
	}
	one := described[group]
	answer := compat.Group{State: one.State, ProtocolType: one.ProtocolType, Protocol: one.Protocol}
	for _, member := range one.Members {
		answer.Members = append(answer.Members, compat.GroupMember{ID: member.MemberID, ClientID: member.ClientID})
	}
	return answer, one.Err
}

func (c *client) DeleteGroup(ctx context.Context, group string) error {
	_, err := c.admin.DeleteGroup(ctx, group)
	return err
}

func (c *client) Committed(ctx context.Context, group string, partition compat.Partition) (int64, error) {
	fetched, err := c.admin.FetchOffsetsForTopics(ctx, group, partition.Topic)
	if err != nil {
		return 0, err
	}
	offset, found := fetched.Lookup(partition.Topic, partition.Index)
	if !found {
		return -1, nil
	}
	return offset.At, offset.Err
}

func (c *client) AlterCommitted(ctx context.Context, group string, partition compat.Partition, offset int64) error {
	return c.admin.CommitAllOffsets(ctx, group, offsets(partition, offset))
}
