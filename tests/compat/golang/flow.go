package compat

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"
)

const (
	flowEvery = 40 * time.Millisecond
	// quietFor is the shortest time that Steady takes.
	quietFor = 1200 * time.Millisecond
	// drainLimit is how long a scenario waits for records to be delivered.
	drainLimit = 45 * time.Second
)

// Flow produces to every partition all the time, so that every rebalance happens under load.
type Flow struct {
	t      *T
	client Client
	log    *Log
	// outages means that the gateway may be down. Then a failed Produce does not fail the scenario, and the flow
	// continues.
	outages bool
	cancel  context.CancelFunc
	ctx     context.Context
	done    sync.WaitGroup
	mu      sync.Mutex
	counts  map[Partition]int
}

// StartFlow starts a flow to these partitions.
func StartFlow(t *T, client Client, log *Log, outages bool, partitions ...Partition) *Flow {
	ctx, cancel := context.WithCancel(t.Context)
	flow := &Flow{t: t, client: client, log: log, outages: outages, ctx: ctx, cancel: cancel, counts: map[Partition]int{}}
	t.Cleanup(flow.stop)
	for _, partition := range partitions {
		flow.Add(partition)
	}
	return flow
}

// Add makes the flow produce to one more partition.
func (f *Flow) Add(partition Partition) {
	f.mu.Lock()
	f.counts[partition] = 0
	f.mu.Unlock()
	f.done.Go(func() {
		ticker := time.NewTicker(flowEvery)
		defer ticker.Stop()
		for i := 0; ; i++ {
			select {
			case <-f.ctx.Done():
				return
			case <-ticker.C:
			}
			// Use the scenario's context and not f.ctx: a record in flight when the flow stops is then still
			// acknowledged and logged.
			offset, err := f.client.Produce(f.t.Context, partition, fmt.Appendf(nil, "%d", i))
			if err != nil {
				if f.outages && f.t.Context.Err() == nil {
					continue
				}
				f.t.Problem(fmt.Errorf("produce to %s: %w", partition, err))
				return
			}
			f.log.Write(Event{Kind: "produced", Topic: partition.Topic, Partition: partition.Index, Offset: offset})
			f.mu.Lock()
			f.counts[partition]++
			f.mu.Unlock()
		}
	})
}

func (f *Flow) stop() {
	f.cancel()
	f.done.Wait()
}

// Moves waits until every partition has more acknowledged records, and more records were delivered.
func (f *Flow) Moves() { f.moves(0) }

// Steady is Moves, but takes at least quietFor.
func (f *Flow) Steady() { f.moves(quietFor) }

func (f *Flow) moves(atLeast time.Duration) {
	f.mu.Lock()
	before := maps.Clone(f.counts)
	f.mu.Unlock()
	delivered := f.log.Delivered()
	started := time.Now()
	f.t.Wait("records flow", drainLimit, func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		for partition, count := range f.counts {
			if count <= before[partition] {
				return fmt.Sprintf("nothing produced to %s", partition)
			}
		}
		if f.log.Delivered() <= delivered {
			return "nothing delivered"
		}
		if time.Since(started) < atLeast {
			return "too short"
		}
		return ""
	})
}

// Drain stops the flow and waits until every acknowledged record has been delivered.
func (f *Flow) Drain() {
	f.stop()
	f.t.Wait("everything delivered", drainLimit, func() string {
		if missing := f.log.Missing(); missing > 0 {
			return fmt.Sprintf("%d records missing", missing)
		}
		return ""
	})
}
