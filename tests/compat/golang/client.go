package compat

import (
	"context"
	"errors"
	"net"
	"time"
)

// ErrFenced is the error of a static member whose instance id another member has taken.
var ErrFenced = errors.New("fenced")

// Commit says when a consumer commits the offsets of processed records.
type Commit string

const (
	// CommitAuto commits by the client's timer, and when partitions are revoked.
	CommitAuto Commit = "auto"
	// CommitInRevoke commits only in the revoke callback.
	CommitInRevoke Commit = "revoke"
)

// Options are the options of a consumer. An empty string means that the consumer does not use this option.
type Options struct {
	Name      string
	Group     string
	Topics    []string
	Pattern   string
	Assignors []string // Kafka's names, in order of preference
	Instance  string
	Commit    Commit
	// LongSession is for members that leave. On a slow machine it keeps a hand-over after a LeaveGroup from being
	// mistaken for an expired session.
	LongSession bool
}

// SessionTimeout returns the member's session timeout.
func (o Options) SessionTimeout() time.Duration {
	if o.LongSession {
		return longSessionTimeout
	}
	return sessionTimeout
}

// Consumer is a member of a group, with its own connections.
type Consumer interface {
	// Owned returns the partitions that the member owns now, sorted.
	Owned() []Partition
	// Generation returns -1 if the generation is unknown.
	Generation() int32
	MemberID() string
	// Err returns the error that ended the member for good, such as ErrFenced.
	Err() error
	// SetTopics changes the subscription of a member, which stays in the group.
	SetTopics(topics []string)
	// Close closes the member. A dynamic member leaves the group, a static member does not.
	Close() error
}

// JoinFunc opens a consumer; it returns before the consumer owns anything.
type JoinFunc func(options Options, sink Sink) (Consumer, error)

// RecordHeader is a header of a record.
type RecordHeader struct {
	Key   string
	Value []byte
}

// Message is a record. A nil key or value differs from an empty one.
type Message struct {
	Offset      int64
	TimestampMS int64 // 0: the client sets the time
	Key         []byte
	Value       []byte
	Headers     []RecordHeader
}

// DialFunc opens a connection.
type DialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// GroupMember is a member as a broker describes it.
type GroupMember struct {
	ID       string
	ClientID string
}

// Group is a group as a broker describes it.
type Group struct {
	State        string
	ProtocolType string
	Protocol     string
	Members      []GroupMember
}

// Special timestamps of OffsetAt, whose other timestamps are milliseconds since the epoch.
const (
	Latest   = int64(-1)
	Earliest = int64(-2)
)

// Client does everything except membership in groups. Several goroutines may use it.
type Client interface {
	// Produce sends one record to a partition and returns its offset once it is stored.
	Produce(ctx context.Context, partition Partition, value []byte) (int64, error)
	// ProduceAll sends records to a partition in batches compressed with `codec`, and waits until all are stored.
	ProduceAll(ctx context.Context, codec string, partition Partition, messages []Message) error
	// ProduceIdempotent sends values with an idempotent producer, whose connections `dial` opens, and waits until all
	// are stored.
	ProduceIdempotent(ctx context.Context, dial DialFunc, partition Partition, values []string) error
	// Read reads `count` records of a partition without a group, beginning at an offset.
	Read(ctx context.Context, partition Partition, offset int64, count int) ([]Message, error)
	// OffsetAt returns the offset for Earliest or Latest, or the offset of the first record at or after a time.
	OffsetAt(ctx context.Context, partition Partition, timestampMS int64) (int64, error)

	CreateTopic(ctx context.Context, topic string, partitions int) error
	// Partitions returns the number of partitions of a topic, or 0 if no such topic exists.
	Partitions(ctx context.Context, topic string) (int, error)
	// AddPartitions increases the number of a topic's partitions to `total`.
	AddPartitions(ctx context.Context, topic string, total int) error
	DeleteTopic(ctx context.Context, topic string) error
	DeleteRecords(ctx context.Context, partition Partition, before int64) error
	TopicConfig(ctx context.Context, topic string) (map[string]string, error)
	SetTopicConfig(ctx context.Context, topic, name, value string) error

	Groups(ctx context.Context) ([]string, error)
	DescribeGroup(ctx context.Context, group string) (Group, error)
	DeleteGroup(ctx context.Context, group string) error
	// Committed returns the committed offset of a partition, or -1 if it has none.
	Committed(ctx context.Context, group string, partition Partition) (int64, error)
	// AlterCommitted commits an offset for a group without members.
	AlterCommitted(ctx context.Context, group string, partition Partition, offset int64) error

	// Member opens a connection on which the caller sends single requests of the group protocol.
	Member(group string) (RawMember, error)
	Close()
}
