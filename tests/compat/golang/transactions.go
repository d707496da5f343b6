package compat

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
)

// ErrProducerFenced is the error of a producer whose transactional id another producer has taken.
var ErrProducerFenced = errors.New("producer fenced")

// TransactionalProducer is a transactional producer, initialized: the previous owner of its transactional id is fenced,
// and that owner's transaction aborted. Its methods return ErrProducerFenced if another producer has taken the id.
type TransactionalProducer interface {
	Begin() error
	// Send sends records and waits until all are acknowledged.
	Send(ctx context.Context, partition Partition, values ...string) error
	Commit(ctx context.Context) error
	Abort(ctx context.Context) error
	Close()
}

// Reader consumes a partition without a group, from its beginning.
type Reader interface {
	// Read returns the next `count` records, or fewer if they do not arrive in time.
	Read(ctx context.Context, count int, within time.Duration) ([]Message, error)
	Close()
}

// GroupRecord is a record that a Transformer reads.
type GroupRecord struct {
	Partition Partition
	Message   Message
}

// Transformer is a group member that writes records, and commits the offsets of the records that it has read, in
// transactions.
type Transformer interface {
	// Read returns the next `count` records, or fewer if they do not arrive in time.
	Read(ctx context.Context, count int, within time.Duration) ([]GroupRecord, error)
	Begin() error
	Send(ctx context.Context, partition Partition, values ...string) error
	// End sends the offsets after all records that were read. Then it commits or aborts the transaction, and returns
	// whether it has committed. If the group has changed, it may abort in place of a commit, without an error.
	End(ctx context.Context, commit bool) (bool, error)
	Close()
}

// TransactionalClient is a Client that has transactions.
type TransactionalClient interface {
	Client
	Transactional(ctx context.Context, id string, timeout time.Duration) (TransactionalProducer, error)
	Reader(partition Partition, readCommitted bool) (Reader, error)
	Transformer(ctx context.Context, id, group, topic string) (Transformer, error)
	// StableEnd returns the last stable offset.
	StableEnd(ctx context.Context, partition Partition) (int64, error)
}

const (
	// nothingFor is how long a scenario watches a reader that must not receive any record.
	nothingFor         = 1500 * time.Millisecond
	readLimit          = 45 * time.Second
	joinLimit          = 30 * time.Second
	transactionTimeout = time.Minute
	shortTimeout       = 2 * time.Second
	// abortLimit is how long the abort of an overdue transaction may take. Kafka looks for such transactions every ten
	// seconds.
	abortLimit = 20 * time.Second
	step       = 5
	lives      = 6
)

// TransactionScenarios returns the canonical scenarios of transactions.
func TransactionScenarios(open func(*T) TransactionalClient) []Scenario {
	scenario := func(name string, run func(*T, TransactionalClient)) Scenario {
		return Scenario{
			Name: "transactions." + name, Limit: 120 * time.Second, Run: func(t *T) { run(t, open(t)) },
		}
	}
	return []Scenario{
		scenario("commit-abort", commitAbort),
		scenario("open", openTransaction),
		scenario("fencing", fencing),
		scenario("consume-transform-produce", consumeTransformProduce),
		scenario("gateway-kill", killWhileTransforming),
		scenario("timeout", transactionTimedOut),
	}
}

func commitAbort(t *T, client TransactionalClient) {
	topic := newTopic(t, client, 2)
	producer := transactional(t, client, t.NewName("id"), transactionTimeout)
	for _, name := range []string{"committed", "aborted", "committed-again"} {
		t.Must(producer.Begin(), "begin")
		for partition := range int32(2) {
			t.Must(producer.Send(t.Context, Partition{topic, partition}, steps(name)...), "send")
		}
		if name == "aborted" {
			t.Must(producer.Abort(t.Context), "abort")
		} else {
			t.Must(producer.Commit(t.Context), "commit")
		}
	}
	// A marker takes one offset after every five records.
	const end = 3 * (step + 1)
	committed := slices.Concat(at(0, "committed"), at(2*(step+1), "committed-again"))
	whole := slices.Concat(at(0, "committed"), at(step+1, "aborted"), at(2*(step+1), "committed-again"))
	for index := range int32(2) {
		partition := Partition{topic, index}
		for _, readCommitted := range []bool{true, false} {
			what, due := fmt.Sprintf("%s, committed: %t", partition, readCommitted), whole
			if readCommitted {
				due = committed
			}
			reader := openReader(t, client, partition, readCommitted)
			reads(t, reader, len(due), readLimit, due, what)
			reads(t, reader, 1, nothingFor, nil, what+", behind all")
			reader.Close()
		}
		ends(t, client, partition, end, end)
	}
}

func openTransaction(t *T, client TransactionalClient) {
	partition := Partition{newTopic(t, client, 1), 0}
	produce := func(value string) {
		_, err := client.Produce(t.Context, partition, []byte(value))
		t.Must(err, "produce")
	}
	produce("before")
	producer := transactional(t, client, t.NewName("id"), transactionTimeout)
	t.Must(producer.Begin(), "begin")
	t.Must(producer.Send(t.Context, partition, steps("open")...), "send")
	produce("behind")
	produce("behind")
	before := []string{"0 before"}
	rest := append(at(1, "open"), fmt.Sprintf("%d behind", step+1), fmt.Sprintf("%d behind", step+2))
	committed := openReader(t, client, partition, true)
	defer committed.Close()
	uncommitted := openReader(t, client, partition, false)
	defer uncommitted.Close()
	reads(t, uncommitted, 1+len(rest), readLimit, slices.Concat(before, rest), "uncommitted")
	reads(t, committed, 1, readLimit, before, "committed")
	reads(t, committed, 1, nothingFor, nil, "committed, while the transaction is open")
	ends(t, client, partition, step+3, 1)
	t.Must(producer.Commit(t.Context), "commit")
	reads(t, committed, len(rest), readLimit, rest, "committed, once the transaction has ended")
	ends(t, client, partition, step+4, step+4)
}

func fencing(t *T, client TransactionalClient) {
	partition, id := Partition{newTopic(t, client, 1), 0}, t.NewName("id")
	first := transactional(t, client, id, transactionTimeout)
	t.Must(first.Begin(), "begin")
	t.Must(first.Send(t.Context, partition, "fenced"), "send")
	second := transactional(t, client, id, transactionTimeout)
	fenced(t, first.Commit(t.Context))
	t.Must(inOne(t, second, partition, "second"), "the second")
	third := transactional(t, client, id, transactionTimeout)
	// The second producer has no open transaction, so the first request of its next transaction is fenced.
	fenced(t, inOne(t, second, partition, "fenced, too"))
	t.Must(inOne(t, third, partition, "third"), "the third")
	reader := openReader(t, client, partition, true)
	defer reader.Close()
	// Offset 1 is the marker of the first, aborted transaction.
	reads(t, reader, 2, readLimit, []string{"2 second", "4 third"}, "committed")
	reads(t, reader, 1, nothingFor, nil, "committed, behind all")
}

func consumeTransformProduce(t *T, client TransactionalClient) {
	source, target, group, id := newTopic(t, client, 2), newTopic(t, client, 2), t.NewName("group"), t.NewName("id")
	fill(t, client, source)
	transformer := openTransformer(t, client, id, group, source)
	found := readSome(t, transformer, 2*step)
	t.Must(transform(t, transformer, found, target), "transform")
	_, err := transformer.End(t.Context, false)
	t.Must(err, "abort")
	transformer.Close()
	for index := range int32(2) {
		if offset, err := client.Committed(t.Context, group, Partition{source, index}); err != nil || offset >= 0 {
			t.Failf("an aborted transaction has committed offset %d, %v", offset, err)
		}
	}
	transformer = openTransformer(t, client, id, group, source)
	for done := 0; done < 8*step; {
		found := readSome(t, transformer, step)
		t.Must(transform(t, transformer, found, target), "transform")
		committed, err := transformer.End(t.Context, true)
		t.Must(err, "commit")
		if !committed {
			t.Failf("aborted behind %d records", done)
		}
		done += len(found)
	}
	transformer.Close()
	t.Wait("all is committed", readLimit, func() string { return uncommitted(t, client, group, source) })
	exactlyOnce(t, client, id, group, source, target)
}

// uncommitted names a partition of the source that the group has not committed to its end. It returns "" if none
// exists.
func uncommitted(t *T, client TransactionalClient, group, source string) string {
	for index := range int32(2) {
		offset, err := client.Committed(t.Context, group, Partition{source, index})
		if err != nil || offset != 4*step {
			return fmt.Sprintf("partition %d: %d, %v", index, offset, err)
		}
	}
	return ""
}

// killWhileTransforming kills the gateway between a transaction's records and its offsets. After an error the
// transformer starts again with the same transactional id, from the committed offsets, as Kafka's documentation says.
func killWhileTransforming(t *T, client TransactionalClient) {
	source, target, group, id := newTopic(t, client, 2), newTopic(t, client, 2), t.NewName("group"), t.NewName("id")
	fill(t, client, source)
	done, killed := 0, false
	life := func() error {
		transformer, err := client.Transformer(t.Context, id, group, source)
		if err != nil {
			return err
		}
		defer transformer.Close()
		for done < 8*step {
			found, err := transformer.Read(t.Context, step, joinLimit)
			if err != nil {
				return err
			}
			if len(found) == 0 {
				// Either the transaction of unknown outcome was committed, or records are only late.
				if uncommitted(t, client, group, source) == "" {
					done = 8 * step
				}
				continue
			}
			if err := transform(t, transformer, found, target); err != nil {
				return err
			}
			if !killed && done >= 2*step {
				killed = true
				t.Kill()
			}
			committed, err := transformer.End(t.Context, true)
			if err != nil {
				return err
			}
			if !committed {
				return errors.New("aborted, since the group has changed")
			}
			done += len(found)
		}
		return nil
	}
	for count := 1; done < 8*step; count++ {
		if err := life(); err != nil {
			fmt.Fprintf(os.Stderr, "life %d ended with %v\n", count, err)
			if count == lives {
				t.Failf("%d records are known to be committed; the last of %d lives: %w", done, lives, err)
			}
		}
	}
	if !killed {
		t.Failf("it was all read before the gateway was killed")
	}
	exactlyOnce(t, client, id, group, source, target)
}

func transactionTimedOut(t *T, client TransactionalClient) {
	partition, id := Partition{newTopic(t, client, 1), 0}, t.NewName("id")
	reader := openReader(t, client, partition, true)
	defer reader.Close()
	producer := transactional(t, client, id, shortTimeout)
	t.Must(producer.Begin(), "begin")
	t.Must(producer.Send(t.Context, partition, "left open"), "send")
	_, err := client.Produce(t.Context, partition, []byte("behind"))
	t.Must(err, "produce")
	reads(t, reader, 1, shortTimeout/2, nil, "committed, before the time is over")
	reads(t, reader, 1, abortLimit, []string{"1 behind"}, "committed, once the time is over")
	if producer.Commit(t.Context) == nil {
		t.Failf("it could commit what had been aborted")
	}
	heir := transactional(t, client, id, transactionTimeout)
	t.Must(inOne(t, heir, partition, "heir"), "the next of the id")
	reads(t, reader, 1, readLimit, []string{"3 heir"}, "committed, by the next of the id")
}

func transactional(t *T, client TransactionalClient, id string, timeout time.Duration) TransactionalProducer {
	producer, err := client.Transactional(t.Context, id, timeout)
	t.Must(err, "transactional producer")
	t.Cleanup(producer.Close)
	return producer
}

func openReader(t *T, client TransactionalClient, partition Partition, readCommitted bool) Reader {
	reader, err := client.Reader(partition, readCommitted)
	t.Must(err, "reader")
	return reader
}

func openTransformer(t *T, client TransactionalClient, id, group, topic string) Transformer {
	transformer, err := client.Transformer(t.Context, id, group, topic)
	t.Must(err, "transformer")
	return transformer
}

func inOne(t *T, producer TransactionalProducer, partition Partition, value string) error {
	if err := producer.Begin(); err != nil {
		return err
	}
	if err := producer.Send(t.Context, partition, value); err != nil {
		return err
	}
	return producer.Commit(t.Context)
}

func fenced(t *T, err error) {
	if !errors.Is(err, ErrProducerFenced) {
		t.Failf("a producer that another one of its id has followed was not fenced: %w", err)
	}
}

// steps returns the values of one transaction.
func steps(name string) []string {
	values := make([]string, step)
	for i := range values {
		values[i] = fmt.Sprintf("%s %d", name, i)
	}
	return values
}

// at returns what `reads` expects of the values of `steps` if they begin at an offset.
func at(offset int, name string) []string {
	values := steps(name)
	for i := range values {
		values[i] = fmt.Sprintf("%d %s", offset+i, values[i])
	}
	return values
}

func reads(t *T, reader Reader, count int, within time.Duration, due []string, what string) {
	messages, err := reader.Read(t.Context, count, within)
	t.Must(err, what)
	var found []string
	for _, message := range messages {
		found = append(found, fmt.Sprintf("%d %s", message.Offset, message.Value))
	}
	if !slices.Equal(found, due) {
		t.Failf("%s: read %q, not %q", what, found, due)
	}
}

// ends waits until a partition's latest offset and last stable offset have these values.
func ends(t *T, client TransactionalClient, partition Partition, latest, stable int64) {
	t.Wait("the ends of the log", readLimit, func() string {
		foundLatest, err := client.OffsetAt(t.Context, partition, Latest)
		t.Must(err, "latest offset")
		foundStable, err := client.StableEnd(t.Context, partition)
		t.Must(err, "last stable offset")
		if foundLatest != latest || foundStable != stable {
			return fmt.Sprintf("%d and %d, not %d and %d", foundLatest, foundStable, latest, stable)
		}
		return ""
	})
}

// fill writes forty records to two partitions.
func fill(t *T, client Client, topic string) {
	for partition := range int32(2) {
		var messages []Message
		for i := range 4 * step {
			messages = append(messages, Message{Value: fmt.Appendf(nil, "v%d", i)})
		}
		t.Must(client.ProduceAll(t.Context, "none", Partition{topic, partition}, messages), "produce")
	}
}

func readSome(t *T, transformer Transformer, count int) []GroupRecord {
	found, err := transformer.Read(t.Context, count, joinLimit)
	t.Must(err, "read")
	if len(found) != count {
		t.Failf("%d records were read, not %d", len(found), count)
	}
	return found
}

// transform begins a transaction and sends its records, but does not end it.
func transform(t *T, transformer Transformer, found []GroupRecord, target string) error {
	if err := transformer.Begin(); err != nil {
		return err
	}
	values := map[int32][]string{}
	for _, record := range found {
		values[record.Partition.Index] = append(values[record.Partition.Index], "made of "+string(record.Message.Value))
	}
	for index, made := range values {
		if err := transformer.Send(t.Context, Partition{target, index}, made...); err != nil {
			return err
		}
	}
	return nil
}

// exactlyOnce checks that each record is in the target once, in its partition's order, and that the group has read all
// records.
func exactlyOnce(t *T, client TransactionalClient, id, group, source, target string) {
	for partition := range int32(2) {
		reader := openReader(t, client, Partition{target, partition}, true)
		messages, err := reader.Read(t.Context, 4*step, readLimit)
		t.Must(err, "read")
		var found, due []string
		for _, message := range messages {
			found = append(found, string(message.Value))
		}
		for i := range 4 * step {
			due = append(due, fmt.Sprintf("made of v%d", i))
		}
		if !slices.Equal(found, due) {
			t.Failf("partition %d holds %q", partition, found)
		}
		reads(t, reader, 1, nothingFor, nil, fmt.Sprintf("partition %d, behind all", partition))
		reader.Close()
	}
	transformer := openTransformer(t, client, id, group, source)
	defer transformer.Close()
	if found, err := transformer.Read(t.Context, 1, 3*nothingFor); err != nil || len(found) > 0 {
		t.Failf("read again by the group: %d records, %v", len(found), err)
	}
}
