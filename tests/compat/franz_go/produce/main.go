// Command produce runs franz-go's producer with its default settings, as bench/producers.py describes. Its arguments
// are BOOTSTRAP TOPIC WARM_UP_S SECONDS RECORDS_PER_S.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	recordBytes = 1024
	payloads    = 1000
)

type run struct {
	client       *kgo.Client
	recordsPerS  int64
	payloads     [payloads][recordBytes]byte
	sent         int64
	acknowledged atomic.Int64

	mutex        sync.Mutex // guards the fields below
	failure      error
	milliseconds []string
}

func main() {
	bootstrap, topic := os.Args[1], os.Args[2]
	client, err := kgo.NewClient(kgo.SeedBrokers(bootstrap), kgo.DefaultProduceTopic(topic))
	must(err)
	each := &run{client: client, recordsPerS: int64(number(os.Args[5]))}
	for index := range each.payloads {
		_, err := rand.Read(each.payloads[index][:])
		must(err)
	}
	each.sendFor(number(os.Args[3]), false)
	fmt.Println("warm")
	before := each.acknowledged.Load()
	took := each.sendFor(number(os.Args[4]), true)
	fmt.Println("done", each.acknowledged.Load()-before, took.Seconds())
	must(client.Flush(context.Background()))
	client.Close()
	must(each.failed())
	fmt.Println(strings.Join(each.milliseconds, " "))
}

func (r *run) sendFor(seconds float64, measured bool) time.Duration {
	start, first := time.Now(), r.sent
	end := start.Add(time.Duration(seconds * float64(time.Second)))
	for now := start; now.Before(end) && r.failed() == nil; now = time.Now() {
		if r.recordsPerS > 0 {
			due := start.Add(time.Duration((r.sent - first) * int64(time.Second) / r.recordsPerS))
			if early := due.Sub(now); early > 0 {
				time.Sleep(min(early, end.Sub(now)))
				continue
			}
		}
		r.send(now, measured && r.recordsPerS > 0)
	}
	return time.Since(start)
}

// send produces one record. It waits while the client's buffer is full.
func (r *run) send(sent time.Time, timed bool) {
	value := r.payloads[r.sent%payloads][:]
	r.sent++
	r.client.Produce(context.Background(), &kgo.Record{Value: value}, func(_ *kgo.Record, err error) {
		if err == nil {
			r.acknowledged.Add(1)
		}
		if err == nil && !timed {
			return
		}
		r.mutex.Lock()
		defer r.mutex.Unlock()
		if err != nil {
			r.failure = err
			return
		}
		r.milliseconds = append(r.milliseconds, fmt.Sprintf("%.3f", float64(time.Since(sent))/1e6))
	})
}

func (r *run) failed() error {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.failure
}

func number(text string) float64 {
	value, err := strconv.ParseFloat(text, 64)
	must(err)
	return value
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
