package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"compat"

	"github.com/IBM/sarama"
)

var codecs = map[string]sarama.CompressionCodec{
	"none":   sarama.CompressionNone,
	"gzip":   sarama.CompressionGZIP,
	"snappy": sarama.CompressionSnappy,
	"lz4":    sarama.CompressionLZ4,
	"zstd":   sarama.CompressionZSTD,
}

// client implements the interfaces of package compat with Sarama's Client, producer, consumer and ClusterAdmin.
type client struct {
	version  sarama.KafkaVersion
	sarama   sarama.Client
	admin    sarama.ClusterAdmin
	producer sarama.SyncProducer
}

func newClient(version sarama.KafkaVersion) (*client, error) {
	opened, err := sarama.NewClient([]string{compat.Bootstrap()}, newConfig(version))
	if err != nil {
		return nil, err
	}
	producer, err := sarama.NewSyncProducerFromClient(opened)
	if err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	admin, err := sarama.NewClusterAdminFromClient(opened)
	if err != nil {
		return nil, errors.Join(err, producer.Close(), opened.Close())
	}
	return &client{version, opened, admin, producer}, nil
}

func (c *client) Close() {
	_ = c.producer.Close()
	_ = c.admin.Close() // closes the client as well
}

func (c *client) Produce(_ context.Context, partition compat.Partition, value []byte) (int64, error) {
	_, offset, err := c.producer.SendMessage(&sarama.ProducerMessage{
		Topic: partition.Topic, Partition: partition.Index, Value: sarama.ByteEncoder(value),
	})
	return offset, err
}

func (c *client) ProduceAll(
	_ context.Context, codec string, partition compat.Partition, messages []compat.Message,
) error {
	config := newConfig(c.version)
	config.Producer.Compression = codecs[codec]
	config.Producer.Flush.Messages = len(messages)
	config.Producer.Flush.Frequency = 50 * time.Millisecond
	producer, err := sarama.NewSyncProducer([]string{compat.Bootstrap()}, config)
	if err != nil {
		return err
	}
	sent := make([]*sarama.ProducerMessage, len(messages))
	for i, message := range messages {
		sent[i] = &sarama.ProducerMessage{Topic: partition.Topic, Partition: partition.Index}
		if message.Key != nil {
			sent[i].Key = sarama.ByteEncoder(message.Key)
		}
		if message.Value != nil {
			sent[i].Value = sarama.ByteEncoder(message.Value)
		}
		if message.TimestampMS != 0 {
			sent[i].Timestamp = time.UnixMilli(message.TimestampMS)
		}
		for _, header := range message.Headers {
			sent[i].Headers = append(sent[i].Headers, sarama.RecordHeader{Key: []byte(header.Key), Value: header.Value})
		}
	}
	return errors.Join(producer.SendMessages(sent), producer.Close())
}

type proxyDialer struct{ dial compat.DialFunc }

func (d proxyDialer) Dial(network, address string) (net.Conn, error) {
	return d.dial(context.Background(), network, address)
}

func (c *client) ProduceIdempotent(
	ctx context.Context, dial compat.DialFunc, partition compat.Partition, values []string,
) error {
	config := newConfig(c.version)
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1 // Sarama requires this for idempotence
	config.Net.Proxy.Enable = true
	config.Net.Proxy.Dialer = proxyDialer{dial}
	config.Producer.Flush.MaxMessages = 20
	producer, err := sarama.NewAsyncProducer([]string{compat.Bootstrap()}, config)
	if err != nil {
		return err
	}
	go func() {
		for _, value := range values {
			producer.Input() <- &sarama.ProducerMessage{
				Topic: partition.Topic, Partition: partition.Index, Value: sarama.StringEncoder(value),
			}
		}
	}()
	// Close the producer only after every message has a result, because a closing producer does not retry.
	var failed []error
	for answered := range len(values) {
		select {
		case <-producer.Successes():
		case err := <-producer.Errors():
			failed = append(failed, err)
		case <-ctx.Done():
			return fmt.Errorf("%d of %d answered: %w", answered, len(values), ctx.Err())
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d refused: %w", len(failed), len(values), failed[0])
	}
	return producer.Close()
}

func (c *client) Read(
	ctx context.Context, partition compat.Partition, offset int64, count int,
) ([]compat.Message, error) {
	consumer, err := sarama.NewConsumerFromClient(c.sarama)
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	reader, err := consumer.ConsumePartition(partition.Topic, partition.Index, offset)
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	var messages []compat.Message
	for len(messages) < count {
		select {
		case read := <-reader.Messages():
			message := compat.Message{
				Offset: read.Offset, TimestampMS: read.Timestamp.UnixMilli(), Key: read.Key, Value: read.Value,
			}
			for _, header := range read.Headers {
				message.Headers = append(message.Headers, compat.RecordHeader{Key: string(header.Key), Value: header.Value})
			}
			messages = append(messages, message)
		case err := <-reader.Errors():
			return messages, err
		case <-ctx.Done():
			return messages, fmt.Errorf("%d of %d records: %w", len(messages), count, ctx.Err())
		}
	}
	return messages, nil
}

func (c *client) OffsetAt(_ context.Context, partition compat.Partition, timestampMS int64) (int64, error) {
	return c.sarama.GetOffset(partition.Topic, partition.Index, timestampMS)
}

func (c *client) CreateTopic(_ context.Context, topic string, partitions int) error {
	detail := &sarama.TopicDetail{NumPartitions: int32(partitions), ReplicationFactor: 1}
	if err := c.admin.CreateTopic(topic, detail, false); err != nil {
		return err
	}
	return c.sarama.RefreshMetadata(topic)
}

func (c *client) Partitions(_ context.Context, topic string) (int, error) {
	described, err := c.admin.DescribeTopics([]string{topic})
	if err != nil {
		return 0, err
	}
	switch {
	case errors.Is(described[0].Err, sarama.ErrUnknownTopicOrPartition):
		return 0, nil
	case !errors.Is(described[0].Err, sarama.ErrNoError):
		return 0, described[0].Err
	}
	return len(described[0].Partitions), nil
}

func (c *client) AddPartitions(_ context.Context, topic string, total int) error {
	if err := c.admin.CreatePartitions(topic, int32(total), nil, false); err != nil {
		return err
	}
	return c.sarama.RefreshMetadata(topic)
}

func (c *client) DeleteTopic(_ context.Context, topic string) error {
	return c.admin.DeleteTopic(topic)
}

func (c *client) DeleteRecords(_ context.Context, partition compat.Partition, before int64) error {
	return c.admin.DeleteRecords(partition.Topic, map[int32]int64{partition.Index: before})
}

func (c *client) TopicConfig(_ context.Context, topic string) (map[string]string, error) {
	entries, err := c.admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: topic})
	values := map[string]string{}
	for _, entry := range entries {
		values[entry.Name] = entry.Value
	}
	return values, err
}

func (c *client) SetTopicConfig(_ context.Context, topic, name, value string) error {
	return c.admin.IncrementalAlterConfig(sarama.TopicResource, topic, map[string]sarama.IncrementalAlterConfigsEntry{
		name: {Operation: sarama.IncrementalAlterConfigsOperationSet, Value: &value},
	}, false)
}

func (c *client) Groups(context.Context) ([]string, error) {
	listed, err := c.admin.ListConsumerGroups()
	return slices.Collect(maps.Keys(listed)), err
}

func (c *client) DescribeGroup(_ context.Context, group string) (compat.Group, error) {
	described, err := c.admin.DescribeConsumerGroups([]string{group})
	if err != nil {
		return compat.Group{}, err
	}
	answer := compat.Group{
		State: described[0].State, ProtocolType: described[0].ProtocolType, Protocol: described[0].Protocol,
	}
	for _, member := range described[0].Members {
		answer.Members = append(answer.Members, compat.GroupMember{ID: member.MemberId, ClientID: member.ClientId})
	}
	return answer, nil
}

func (c *client) DeleteGroup(_ context.Context, group string) error {
	return c.admin.DeleteConsumerGroup(group)
}

func (c *client) Committed(_ context.Context, group string, partition compat.Partition) (int64, error) {
	offsets, err := c.admin.ListConsumerGroupOffsets(group, map[string][]int32{partition.Topic: {partition.Index}})
	if err != nil {
		return 0, err
	}
	block := offsets.GetGroupBlock(group, partition.Topic, partition.Index)
	if block == nil {
		block = offsets.GetBlock(partition.Topic, partition.Index)
	}
	if block == nil {
		return 0, fmt.Errorf("no answer for %s", partition)
	}
	if !errors.Is(block.Err, sarama.ErrNoError) {
		return 0, block.Err
	}
	return block.Offset, nil
}

func (c *client) AlterCommitted(_ context.Context, group string, partition compat.Partition, offset int64) error {
	answer, err := c.admin.AlterConsumerGroupOffsets(group, map[string]map[int32]sarama.OffsetAndMetadata{
		partition.Topic: {partition.Index: {Offset: offset, LeaderEpoch: -1}},
	}, nil)
	if err != nil {
		return err
	}
	if code := answer.Errors[partition.Topic][partition.Index]; !errors.Is(code, sarama.ErrNoError) {
		return code
	}
	return nil
}
