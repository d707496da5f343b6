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
	// quietFor is more than the checker's REBALANCE_QUIET_MS.
	quietFor = 1200 * time.Millisecond
	// drainLimit is how long records may take to arrive once nothing is produced any more.
	drainLimit = 45 * time.Second
)

// Flow produces to every partition all the time, so that a rebalance is always one under load.
type Flow struct {
	t      *T
	client Client
	log    *Log
	// outages: a record that cannot be produced is tried again instead of failing the scenario.
	outages bool
	cancel  context.CancelFunc
	ctx     context.Context
	done    sync.WaitGroup
	mu      sync.Mutex
	counts  map[Partition]int
}

// StartFlow begins with these partitions.
func StartFlow(t *T, client Client, log *Log, outages bool, partitions ...Partition) *Flow {
	ctx, cancel := context.WithCancel(t.Context)
	flow := &Flow{t: t, client: client, log: log, outages: outages, ctx: ctx, cancel: cancel, counts: map[Partition]int{}}
	t.Cleanup(flow.stop)
	for _, partition := range partitions {
		flow.Add(partition)
	}
	return flow
}

// Add takes in one more partition.
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
			// Not under f.ctx: a record that was sent when the flow stops is still acknowledged, and logged.
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

// Moves waits until every partition has had more records, and some have been delivered.
func (f *Flow) Moves() { f.moves(0) }

// Steady is Moves for long enough that the checker tells the rebalances before and after it apart, and measures the
// pause in each.
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

// Drain stops the flow and waits until everything has been delivered.
func (f *Flow) Drain() {
	f.stop()
	f.t.Wait("everything delivered", drainLimit, func() string {
		if missing := f.log.Missing(); missing > 0 {
			return fmt.Sprintf("%d records missing", missing)
		}
		return ""
	})
}
