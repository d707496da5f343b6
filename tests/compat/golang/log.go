package compat

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// Partition is a topic's partition.
type Partition struct {
	Topic string
	Index int32
}

func (p Partition) String() string { return fmt.Sprintf("%s-%d", p.Topic, p.Index) }

func sortPartitions(partitions []Partition) []Partition {
	slices.SortFunc(partitions, func(a, b Partition) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Index, b.Index))
	})
	return partitions
}

// Header is the first line of a delivery log.
type Header struct {
	Mode              string `json:"mode"` // eager or cooperative
	RedeliveryAllowed bool   `json:"redelivery_allowed,omitempty"`
	Topic             string `json:"topic"`
	Partitions        int    `json:"partitions"`
}

// Event is one line of a delivery log; T is in milliseconds since the epoch.
type Event struct {
	T         float64 `json:"t"`
	Kind      string  `json:"event"`
	Member    string  `json:"member,omitempty"`
	Topic     string  `json:"topic"`
	Partition int32   `json:"partition"`
	Offset    int64   `json:"offset"`
}

// Sink accepts events. It sets the time of an event that has none.
type Sink interface{ Write(event Event) }

func now() float64 { return float64(time.Now().UnixMicro()) / 1000 }

// Log is a delivery log. It writes events to a file, and remembers which records were acknowledged and delivered.
type Log struct {
	mu        sync.Mutex
	file      *os.File
	err       error
	produced  map[Partition]map[int64]bool
	delivered map[Partition]map[int64]bool
	count     int
}

func newLog(path string, header Header) (*Log, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	line, err := json.Marshal(struct {
		T    float64 `json:"t"`
		Kind string  `json:"event"`
		Header
	}{now(), "scenario", header})
	if err != nil {
		return nil, err
	}
	_, err = file.Write(append(line, '\n'))
	produced, delivered := map[Partition]map[int64]bool{}, map[Partition]map[int64]bool{}
	return &Log{file: file, err: err, produced: produced, delivered: delivered}, nil
}

// Write appends an event. If that fails, the scenario fails at its end.
func (l *Log) Write(event Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if event.T == 0 {
		event.T = now()
	}
	partition := Partition{event.Topic, event.Partition}
	switch event.Kind {
	case "produced":
		mark(l.produced, partition, event.Offset)
	case "delivered":
		mark(l.delivered, partition, event.Offset)
		l.count++
	}
	line, err := json.Marshal(event)
	if err == nil {
		_, err = l.file.Write(append(line, '\n'))
	}
	if l.err == nil {
		l.err = err
	}
}

func mark(offsets map[Partition]map[int64]bool, partition Partition, offset int64) {
	if offsets[partition] == nil {
		offsets[partition] = map[int64]bool{}
	}
	offsets[partition][offset] = true
}

// Delivered returns the number of deliveries, including repeated deliveries of one record.
func (l *Log) Delivered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// Missing returns the number of acknowledged records that were not delivered yet.
func (l *Log) Missing() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	missing := 0
	for partition, offsets := range l.produced {
		for offset := range offsets {
			if !l.delivered[partition][offset] {
				missing++
			}
		}
	}
	return missing
}

func (l *Log) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.file.Close(); err != nil {
		return err
	}
	return l.err
}

// Discard ignores events. It is for groups whose deliveries are not checked.
var Discard Sink = discard{}

type discard struct{}

func (discard) Write(Event) {}

// Ownership holds the partitions that one member owns. Each change is logged immediately.
type Ownership struct {
	member string
	sink   Sink
	mu     sync.Mutex
	owned  map[Partition]bool
}

// NewOwnership returns an Ownership without partitions.
func NewOwnership(member string, sink Sink) *Ownership {
	return &Ownership{member: member, sink: sink, owned: map[Partition]bool{}}
}

// Assigned, Revoked, Lost and Delivered log what the client reports.
func (o *Ownership) Assigned(topic string, partition int32) {
	o.change("assigned", topic, partition, true)
}

func (o *Ownership) Revoked(topic string, partition int32) {
	o.change("revoked", topic, partition, false)
}

func (o *Ownership) Lost(topic string, partition int32) { o.change("lost", topic, partition, false) }

func (o *Ownership) change(kind string, topic string, partition int32, owned bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if owned {
		o.owned[Partition{topic, partition}] = true
	} else {
		delete(o.owned, Partition{topic, partition})
	}
	o.sink.Write(Event{Kind: kind, Member: o.member, Topic: topic, Partition: partition, Offset: -1})
}

func (o *Ownership) Delivered(topic string, partition int32, offset int64) {
	o.sink.Write(Event{Kind: "delivered", Member: o.member, Topic: topic, Partition: partition, Offset: offset})
}

// Ended logs the end of the member's ownership: `kind` is closed or killed.
func (o *Ownership) Ended(kind string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.owned)
	o.sink.Write(Event{Kind: kind, Member: o.member, Partition: -1, Offset: -1})
}

// Owned returns the owned partitions, sorted.
func (o *Ownership) Owned() []Partition {
	o.mu.Lock()
	defer o.mu.Unlock()
	owned := make([]Partition, 0, len(o.owned))
	for partition := range o.owned {
		owned = append(owned, partition)
	}
	return sortPartitions(owned)
}
