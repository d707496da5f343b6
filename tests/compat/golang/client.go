package compat

import (
	"context"
	"errors"
	"net"
	"time"
)

// ErrFenced is what has ended a static member whose instance id another one has taken.
var ErrFenced = errors.New("fenced")

// Commit says when a consumer commits what it has processed.
type Commit string

const (
	// CommitAuto is by the client's timer, and when partitions are taken away.
	CommitAuto Commit = "auto"
	// CommitInRevoke is only in the callback in which partitions are taken away.
	CommitInRevoke Commit = "revoke"
)

// Options of a consumer. Names that are left empty are not sent.
type Options struct {
	Name      string
	Group     string
	Topics    []string
	Pattern   string
	Assignors []string // Kafka's names, in order of preference
	Instance  string
	Commit    Commit
	// LongSession is for members that leave: a slow machine cannot confuse leaving with an expired session.
	LongSession bool
}

// SessionTimeout of the member.
func (o Options) SessionTimeout() time.Duration {
	if o.LongSession {
		return longSessionTimeout
	}
	return sessionTimeout
}

// Consumer is a member of a group, with its own connections.
type Consumer interface {
	// Owned is what it owns at this moment, sorted.
	Owned() []Partition
	// Generation is -1 where it is not known.
	Generation() int32
	MemberID() string
	// Err is what ended it for good, such as having been fenced.
	Err() error
	// SetTopics changes the subscription of a member that stays.
	SetTopics(topics []string)
	// Close leaves the group; a static member stays in it.
	Close() error
}

// JoinFunc opens a consumer; it returns before the consumer owns anything.
type JoinFunc func(options Options, sink Sink) (Consumer, error)

// Header of a record.
type RecordHeader struct {
	Key   string
	Value []byte
}

// Message is a record; nil and empty keys and values differ.
type Message struct {
	Offset      int64
	TimestampMS int64 // 0: the client's own
	Key         []byte
	Value       []byte
	Headers     []RecordHeader
}

// DialFunc opens a connection.
type DialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// GroupMember as a broker describes it.
type GroupMember struct {
	ID       string
	ClientID string
}

// Group as a broker describes it.
type Group struct {
	State        string
	ProtocolType string
	Protocol     string
	Members      []GroupMember
}

// Times that OffsetAt takes besides milliseconds since the epoch.
const (
	Latest   = int64(-1)
	Earliest = int64(-2)
)

// Client does everything outside of groups. It may be used by several goroutines.
type Client interface {
	// Produce sends one record to a partition and answers its offset once it is stored.
	Produce(ctx context.Context, partition Partition, value []byte) (int64, error)
	// ProduceAll sends records to a partition as batches of a codec, and waits for all.
	ProduceAll(ctx context.Context, codec string, partition Partition, messages []Message) error
	// ProduceIdempotent sends values by an idempotent producer over connections of `dial`, and waits for all.
	ProduceIdempotent(ctx context.Context, dial DialFunc, partition Partition, values []string) error
	// Read consumes `count` records of a partition without a group, from an offset.
	Read(ctx context.Context, partition Partition, offset int64, count int) ([]Message, error)
	// OffsetAt asks for Earliest, Latest, or the first offset at or after a time.
	OffsetAt(ctx context.Context, partition Partition, timestampMS int64) (int64, error)

	CreateTopic(ctx context.Context, topic string, partitions int) error
	// Partitions counts the partitions of a topic; 0 if there is no such topic.
	Partitions(ctx context.Context, topic string) (int, error)
	// AddPartitions brings a topic to `total` partitions.
	AddPartitions(ctx context.Context, topic string, total int) error
	DeleteTopic(ctx context.Context, topic string) error
	DeleteRecords(ctx context.Context, partition Partition, before int64) error
	TopicConfig(ctx context.Context, topic string) (map[string]string, error)
	SetTopicConfig(ctx context.Context, topic, name, value string) error

	Groups(ctx context.Context) ([]string, error)
	DescribeGroup(ctx context.Context, group string) (Group, error)
	DeleteGroup(ctx context.Context, group string) error
	// Committed is -1 for a partition without a committed offset.
	Committed(ctx context.Context, group string, partition Partition) (int64, error)
	// AlterCommitted commits on behalf of a group without members.
	AlterCommitted(ctx context.Context, group string, partition Partition, offset int64) error

	// Member opens a connection for requests of the group protocol, one by one.
	Member(group string) (RawMember, error)
	Close()
}
