package compat

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync/atomic"
)

// Codecs lists the compression codecs by Kafka's names.
var Codecs = []string{"none", "gzip", "snappy", "lz4", "zstd"}

// DataScenarios returns the canonical scenarios of producing and consuming.
func DataScenarios(open func(*T) Client) []Scenario {
	var scenarios []Scenario
	for _, codec := range Codecs {
		scenarios = append(scenarios, Scenario{
			Name: "data.codec." + codec, Run: func(t *T) { roundTrip(t, open(t), codec) },
		})
	}
	return append(scenarios,
		Scenario{Name: "data.idempotent", Run: func(t *T) { idempotent(t, open(t)) }},
		Scenario{Name: "data.seek_and_times", Run: func(t *T) { seekAndTimes(t, open(t)) }},
		Scenario{Name: "data.delete_records", Run: func(t *T) { deleteRecords(t, open(t)) }},
	)
}

func newTopic(t *T, client Client, partitions int) string {
	topic := t.NewName("topic")
	t.Must(client.CreateTopic(t.Context, topic, partitions), "create topic")
	return topic
}

const largeRecordBytes = 900_000

func roundTrip(t *T, client Client, codec string) {
	partition := Partition{newTopic(t, client, 1), 0}
	// Half of the value is random, so that a codec can compress the record but cannot make it small.
	large := make([]byte, largeRecordBytes)
	random := rand.NewChaCha8([32]byte{7})
	if _, err := random.Read(large[:largeRecordBytes/2]); err != nil {
		t.Failf("random: %w", err)
	}
	sent := []Message{
		{Key: []byte("key"), Value: []byte("value"), Headers: []RecordHeader{{"a", []byte("1")}, {"a", []byte("2")}, {"empty", []byte{}}}},
		{Key: nil, Value: []byte("no key")},
		{Key: []byte("no value"), Value: nil},
		{Key: []byte{}, Value: []byte{}},
		{Key: []byte("large"), Value: large},
	}
	for i := range 200 {
		sent = append(sent, Message{Key: fmt.Appendf(nil, "%d", i), Value: bytes.Repeat([]byte("compressible "), 20)})
	}
	t.Must(client.ProduceAll(t.Context, codec, partition, sent), "produce")
	read, err := client.Read(t.Context, partition, 0, len(sent))
	t.Must(err, "read")
	if len(read) != len(sent) {
		t.Failf("%d records came back of %d", len(read), len(sent))
	}
	for i, message := range read {
		switch {
		case message.Offset != int64(i):
			t.Failf("record %d has offset %d", i, message.Offset)
		case !same(message.Key, sent[i].Key) || !same(message.Value, sent[i].Value):
			t.Failf("record %d came back with another key or value", i)
		case len(message.Headers) != len(sent[i].Headers):
			t.Failf("record %d has %d headers", i, len(message.Headers))
		}
		for j, header := range message.Headers {
			if header.Key != sent[i].Headers[j].Key || !bytes.Equal(header.Value, sent[i].Headers[j].Value) {
				t.Failf("record %d, header %d: %s=%q", i, j, header.Key, header.Value)
			}
		}
	}
}

func same(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }

func idempotent(t *T, client Client) {
	partition := Partition{newTopic(t, client, 1), 0}
	values := make([]string, 400)
	for i := range values {
		values[i] = fmt.Sprintf("%d", i)
	}
	cutter := &Cutter{At: []int64{2, 4, 7}}
	t.Must(client.ProduceIdempotent(t.Context, cutter.Dial, partition, values), "produce")
	if cutter.Cuts() == 0 {
		t.Failf("no answer was cut off: %d produce requests", cutter.produces.Load())
	}
	end, err := client.OffsetAt(t.Context, partition, Latest)
	t.Must(err, "latest offset")
	if end != int64(len(values)) {
		t.Failf("%d records are stored of %d, after %d lost answers", end, len(values), cutter.Cuts())
	}
	read, err := client.Read(t.Context, partition, 0, len(values))
	t.Must(err, "read")
	for i, message := range read {
		if string(message.Value) != values[i] {
			t.Failf("offset %d holds %s", i, message.Value)
		}
	}
}

// Cutter dials connections that lose the responses to some Produce requests. The broker processes such a request, and
// the connection breaks when the response arrives. At has the numbers of these requests, counted from 1 over all
// connections.
type Cutter struct {
	At       []int64
	produces atomic.Int64
	cuts     atomic.Int64
}

// Cuts returns the number of lost responses.
func (c *Cutter) Cuts() int64 { return c.cuts.Load() }

// Dial opens a connection. It is a DialFunc.
func (c *Cutter) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &cutConn{Conn: conn, cutter: c}, nil
}

type cutConn struct {
	net.Conn
	cutter *Cutter
	doomed atomic.Bool
}

const (
	produceKey      = 0
	requestKeyStart = 4
)

// Write looks for a Produce request at the start of `buffer`. Both clients pass one or several whole requests at a
// time.
func (c *cutConn) Write(buffer []byte) (int, error) {
	if len(buffer) > requestKeyStart+2 && binary.BigEndian.Uint16(buffer[requestKeyStart:]) == produceKey {
		if slices.Contains(c.cutter.At, c.cutter.produces.Add(1)) {
			c.doomed.Store(true)
		}
	}
	return c.Conn.Write(buffer)
}

func (c *cutConn) Read(buffer []byte) (int, error) {
	read, err := c.Conn.Read(buffer)
	if err == nil && c.doomed.Load() {
		c.cutter.cuts.Add(1)
		return 0, errors.Join(net.ErrClosed, c.Conn.Close())
	}
	return read, err
}

func seekAndTimes(t *T, client Client) {
	partition := Partition{newTopic(t, client, 1), 0}
	const count, base, step = 20, int64(1_700_000_000_000), int64(1000)
	var sent []Message
	for i := range int64(count) {
		sent = append(sent, Message{Value: fmt.Appendf(nil, "%d", i), TimestampMS: base + i*step})
	}
	t.Must(client.ProduceAll(t.Context, "none", partition, sent), "produce")
	expect := func(what string, timestamp, want int64) {
		offset, err := client.OffsetAt(t.Context, partition, timestamp)
		t.Must(err, what)
		if offset != want {
			t.Failf("%s: offset %d, not %d", what, offset, want)
		}
	}
	expect("earliest", Earliest, 0)
	expect("latest", Latest, count)
	expect("time of a record", base+5*step, 5)
	expect("time between records", base+5*step+1, 6)
	expect("time before all", base-1, 0)
	read, err := client.Read(t.Context, partition, 12, 8)
	t.Must(err, "read from an offset")
	for i, message := range read {
		if want := int64(12 + i); message.Offset != want || message.TimestampMS != base+want*step {
			t.Failf("offset %d, time %d where %d was due", message.Offset, message.TimestampMS, want)
		}
	}
}

func deleteRecords(t *T, client Client) {
	partition := Partition{newTopic(t, client, 1), 0}
	for i := range 10 {
		_, err := client.Produce(t.Context, partition, fmt.Appendf(nil, "%d", i))
		t.Must(err, "produce")
	}
	t.Must(client.DeleteRecords(t.Context, partition, 6), "delete records")
	earliest, err := client.OffsetAt(t.Context, partition, Earliest)
	t.Must(err, "earliest")
	if earliest != 6 {
		t.Failf("the earliest offset is %d, not 6", earliest)
	}
	read, err := client.Read(t.Context, partition, earliest, 4)
	t.Must(err, "read")
	if read[0].Offset != 6 || string(read[0].Value) != "6" {
		t.Failf("offset %d holds %s", read[0].Offset, read[0].Value)
	}
	if read, err := client.Read(t.Context, partition, 0, 1); err == nil && read[0].Offset < 6 {
		t.Failf("offset %d was read after it had been deleted", read[0].Offset)
	}
}
