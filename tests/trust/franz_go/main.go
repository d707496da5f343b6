// Command franz_go runs all clients of franz-go in one process: producers, members of groups, and clients that copy
// records in transactions.
//
// Standard input has one command per line, standard output one event per line. Fields are separated by tabs. The second
// field is the id that the caller gave to the client. tests/trust/franz.py is the caller, and Clients.java speaks the
// same commands. Times are seconds of CLOCK_MONOTONIC, the clock of Python's time.monotonic.
package main

import (
	"bufio"
	"context"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	pollTime    = 100 * time.Millisecond
	callTime    = 10 * time.Second
	commitEvery = 100
	// longestOutage is how long a record may wait for a node.
	longestOutage = 900 * time.Second
	maxPolled     = 500
	// transactionTime is how long a transaction may stay open, and transferAtOnce how many records it copies.
	transactionTime = 30 * time.Second
	transferAtOnce  = 50
	// endTime is how long the end of a transaction may take. Afterwards the client is not used any more.
	endTime    = 60 * time.Second
	maxWaiting = 10_000
)

var (
	bootstrap string
	speaking  sync.Mutex
)

var codecs = map[string]kgo.CompressionCodec{
	"none": kgo.NoCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

// client is one producer, member or transfer.
type client interface {
	command(words []string)
	stop()
}

func main() {
	bootstrap = os.Args[1]
	clients := map[string]client{}
	commands := bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		words := strings.Split(commands.Text(), "\t")
		switch words[0] {
		case "producer":
			clients[words[1]] = startProducer(words)
		case "member":
			clients[words[1]] = startMember(words)
		case "transfer":
			clients[words[1]] = startTransfer(words)
		case "stop":
			clients[words[1]].stop()
		default:
			clients[words[1]].command(words)
		}
	}
}

func say(words ...any) {
	texts := make([]string, len(words))
	for index, word := range words {
		texts[index] = strings.NewReplacer("\t", " ", "\n", " ").Replace(fmt.Sprint(word))
	}
	speaking.Lock()
	defer speaking.Unlock()
	fmt.Println(strings.Join(texts, "\t"))
}

// end reports the end of a client, with the error that ended it or nothing.
func end(id string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	say("ended", id, text)
}

func now() string {
	var moment syscall.Timespec
	const monotonic = 1
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, monotonic, uintptr(unsafe.Pointer(&moment)), 0)
	return strconv.FormatFloat(float64(moment.Sec)+float64(moment.Nsec)/1e9, 'f', 6, 64)
}

// number returns the integer that the caller wrote.
func number(text string) int {
	found, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return found
}

func common(clientID string) []kgo.Opt {
	return []kgo.Opt{
		kgo.SeedBrokers(strings.Split(bootstrap, ",")...),
		kgo.ClientID(clientID),
		kgo.MetadataMaxAge(5 * time.Second),
		kgo.MetadataMinAge(100 * time.Millisecond),
		kgo.RequestTimeoutOverhead(6 * time.Second),
		kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }),
		// The nodes require no authentication. By default kgo takes an EOF on a connection's first request for missing
		// SASL or TLS, and does not retry.
		kgo.AlwaysRetryEOF(),
	}
}

// producer runs one producer. Its command is: producer, id, client id, idempotent, linger.ms, compression.type.
type producer struct {
	id      string
	kafka   *kgo.Client
	records chan []string
}

func startProducer(words []string) client {
	opts := append(common(words[2]),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(time.Duration(number(words[4]))*time.Millisecond),
		kgo.ProducerBatchCompression(codecs[words[5]]),
		kgo.RecordDeliveryTimeout(longestOutage),
		// Without this option the client restarts its sequence numbers after a gap, and may write a record twice.
		kgo.StopProducerOnDataLossDetected(),
	)
	if words[3] == "false" {
		opts = append(opts, kgo.DisableIdempotentWrite())
	}
	p := &producer{id: words[1], records: make(chan []string, maxWaiting)}
	kafka, err := kgo.NewClient(opts...)
	if err != nil {
		panic(err)
	}
	p.kafka = kafka
	go p.live()
	return p
}

// command takes the fields: send, id, topic, partition, key or nothing, value.
func (p *producer) command(words []string) { p.records <- words }

func (p *producer) stop() { close(p.records) }

func (p *producer) live() {
	ctx := context.Background()
	for words := range p.records {
		record := &kgo.Record{Topic: words[2], Partition: int32(number(words[3])), Value: []byte(words[5])}
		if words[4] != "" {
			record.Key = []byte(words[4])
		}
		p.kafka.Produce(ctx, record, func(sent *kgo.Record, err error) {
			if err != nil {
				say("sent", p.id, string(sent.Value), "unknown", -1)
				return
			}
			say("sent", p.id, string(sent.Value), "ok", sent.Offset)
		})
	}
	err := p.kafka.Flush(ctx)
	p.kafka.Close()
	end(p.id, err)
}

// member runs one member of a group. Its command is: member, id, client id, group, topic, protocol, isolation.level,
// group.instance.id or nothing, release in ms.
//
// A rebalance waits until the member has processed the records that it has polled. The mutex keeps the end of the
// member apart from a callback that has just begun.
type member struct {
	id, topic string
	release   time.Duration
	kafka     *kgo.Client
	stopping  atomic.Bool

	mu        sync.Mutex
	closing   bool
	positions map[int32]int64
	owned     map[int32]bool
}

func startMember(words []string) client {
	m := &member{
		id: words[1], topic: words[4], release: time.Duration(number(words[8])) * time.Millisecond,
		positions: map[int32]int64{}, owned: map[int32]bool{},
	}
	opts := append(common(words[2]),
		kgo.ConsumerGroup(words[3]),
		kgo.ConsumeTopics(words[4]),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.HeartbeatInterval(500*time.Millisecond),
		kgo.SessionTimeout(45*time.Second),
		kgo.FetchMaxWait(500*time.Millisecond),
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, assigned map[string][]int32) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.closing { // the group assigned it the partitions of another closing member, but it reads nothing more
				return
			}
			for _, partition := range assigned[m.topic] {
				delete(m.positions, partition)
				m.owned[partition] = true
				say("assigned", m.id, partition, now())
			}
		}),
		kgo.OnPartitionsRevoked(func(_ context.Context, _ *kgo.Client, revoked map[string][]int32) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.closing || len(revoked[m.topic]) == 0 {
				return
			}
			time.Sleep(m.release)
			m.commit(revoked[m.topic])
			m.forget(revoked[m.topic], "revoked")
		}),
		kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, lost map[string][]int32) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if !m.closing {
				m.forget(lost[m.topic], "lost")
			}
		}),
	)
	switch words[5] {
	case "consumer":
		opts = append(opts, kgo.ServerSideBalancer())
	case "eager":
		opts = append(opts, kgo.Balancers(kgo.RangeBalancer()))
	default:
		opts = append(opts, kgo.Balancers(kgo.CooperativeStickyBalancer()))
	}
	if words[6] == "read_committed" {
		opts = append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	if words[7] != "" {
		opts = append(opts, kgo.InstanceID(words[7]))
	}
	kafka, err := kgo.NewClient(opts...)
	if err != nil {
		panic(err)
	}
	m.kafka = kafka
	go m.live()
	return m
}

func (m *member) command(words []string) { panic(words[0]) }

func (m *member) stop() { m.stopping.Store(true) }

func (m *member) live() {
	processed := 0
	for !m.stopping.Load() {
		ctx, cancel := context.WithTimeout(context.Background(), pollTime)
		fetches := m.kafka.PollRecords(ctx, maxPolled)
		cancel()
		m.mu.Lock()
		fetches.EachRecord(func(record *kgo.Record) {
			say("took", m.id, record.Partition, record.Offset, string(record.Value), now())
			m.positions[record.Partition] = record.Offset + 1
			processed++
		})
		if processed >= commitEvery {
			m.commit(m.all())
			processed = 0
		}
		m.mu.Unlock()
		m.kafka.AllowRebalance()
	}
	// A static member keeps its partitions when it closes, so this program itself reports that the member reads no
	// more.
	m.mu.Lock()
	m.commit(m.all())
	m.closing = true
	for partition := range m.owned {
		say("revoked", m.id, partition, now())
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	// Close alone would wait for a coordinator that does not respond. The error says nothing more than that.
	_ = m.kafka.LeaveGroupContext(ctx)
	m.kafka.Close()
	end(m.id, nil)
}

func (m *member) all() []int32 {
	var partitions []int32
	for partition := range m.positions {
		partitions = append(partitions, partition)
	}
	return partitions
}

func (m *member) forget(partitions []int32, change string) {
	for _, partition := range partitions {
		delete(m.positions, partition)
		delete(m.owned, partition)
		say(change, m.id, partition, now())
	}
}

func (m *member) commit(partitions []int32) {
	wanted := map[int32]kgo.EpochOffset{}
	for _, partition := range partitions {
		if offset, found := m.positions[partition]; found {
			wanted[partition] = kgo.EpochOffset{Epoch: -1, Offset: offset}
		}
	}
	if len(wanted) == 0 {
		return
	}
	invoked := now()
	stored := map[int32]bool{}
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	m.kafka.CommitOffsetsSync(ctx, map[string]map[int32]kgo.EpochOffset{m.topic: wanted},
		func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, answer *kmsg.OffsetCommitResponse, err error) {
			if err != nil {
				return
			}
			for _, topic := range answer.Topics {
				for _, partition := range topic.Partitions {
					stored[partition.Partition] = kerr.ErrorForCode(partition.ErrorCode) == nil
				}
			}
		})
	for partition, offset := range wanted {
		outcome := "unknown"
		if stored[partition] {
			outcome = "ok"
		}
		say("committed", m.id, partition, offset.Offset, invoked, now(), outcome)
	}
}

// transfer copies records in transactions. Its command is: transfer, id, group, source, target, transactional.id,
// partitions of the target, seed, share of aborts.
//
// After an abort the session reads again from the committed offsets. An error ends the client, and the caller starts the
// next one.
type transfer struct {
	id, target string
	partitions int
	aborted    float64
	chance     *rand.Rand
	session    *kgo.GroupTransactSession
	stopping   atomic.Bool
}

func startTransfer(words []string) client {
	aborted, err := strconv.ParseFloat(words[8], 64)
	if err != nil {
		panic(err)
	}
	t := &transfer{
		id: words[1], target: words[4], partitions: number(words[6]), aborted: aborted,
		chance: rand.New(rand.NewSource(int64(number(words[7])))),
	}
	session, err := kgo.NewGroupTransactSession(append(common(words[5]),
		kgo.TransactionalID(words[5]),
		kgo.TransactionTimeout(transactionTime),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.RecordDeliveryTimeout(transactionTime),
		kgo.ConsumerGroup(words[2]),
		kgo.ConsumeTopics(words[3]),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.Balancers(kgo.CooperativeStickyBalancer()),
		kgo.HeartbeatInterval(500*time.Millisecond),
		kgo.SessionTimeout(15*time.Second),
		kgo.FetchMaxWait(500*time.Millisecond),
	)...)
	if err != nil {
		panic(err)
	}
	t.session = session
	go t.live()
	return t
}

func (t *transfer) command(words []string) { panic(words[0]) }

func (t *transfer) stop() { t.stopping.Store(true) }

func (t *transfer) live() {
	var err error
	for err == nil && !t.stopping.Load() {
		ctx, cancel := context.WithTimeout(context.Background(), pollTime)
		records := t.session.PollRecords(ctx, transferAtOnce).Records()
		cancel()
		if len(records) > 0 {
			err = t.copy(records)
		}
	}
	t.session.Close()
	end(t.id, err)
}

// copy copies the records in one transaction. It returns an error if the client must not be used any more.
func (t *transfer) copy(records []*kgo.Record) error {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	if err := t.session.Begin(); err != nil {
		return err
	}
	produced := kgo.AbortingFirstErrPromise(t.session.Client())
	for _, record := range records {
		partition := int32(number(string(record.Value)) % t.partitions)
		result := &kgo.Record{Topic: t.target, Partition: partition, Value: record.Value}
		t.session.Produce(ctx, result, produced.Promise())
	}
	failed := produced.Err()
	commit := kgo.TransactionEndTry(failed == nil && t.chance.Float64() >= t.aborted)
	committed, err := t.session.End(ctx, commit)
	if err != nil {
		return err
	}
	if committed {
		say("transferred", t.id, len(records))
	}
	return failed
}
