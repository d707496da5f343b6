// Package compat contains the parts that the Go suites share: the scenarios, the delivery log, and the output for the
// runner. Scenarios are written once against the interfaces of client.go. The output is one line of JSON per scenario.
//
// The one idea: a suite is an adapter. A scenario that both clients support is written here once. A scenario that only
// one of them supports lives with its adapter. This package imports no Kafka client.
package compat

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Scenario is one row of the report card. Skip says why the client cannot run it; "" if the client can.
type Scenario struct {
	Name  string
	Skip  string
	Limit time.Duration // defaultLimit if 0
	Run   func(t *T)
}

// Suite is the suite of one client library. Join opens consumers in this process, and in the member processes that it
// starts.
type Suite struct {
	Name      string
	Library   string // module path, for -version
	Bootstrap string
	Join      JoinFunc
	Scenarios []Scenario
}

const (
	defaultLimit = 120 * time.Second
	// settleLimit is the longest wait for a group to settle. It is far above the time of a rebalance, and below the
	// limit of a scenario.
	settleLimit = 45 * time.Second
	// sessionTimeout is the shortest session timeout that a broker with default settings accepts.
	sessionTimeout = 6 * time.Second
	// longSessionTimeout is the session timeout of members that leave. It is longer than SoonLimit, so a hand-over
	// within SoonLimit was caused by a LeaveGroup.
	longSessionTimeout = 45 * time.Second
	// SoonLimit is how long a hand-over after a LeaveGroup may take. It is shorter than longSessionTimeout.
	SoonLimit = 30 * time.Second
	pollEvery = 20 * time.Millisecond
	stopGrace = 10 * time.Second
)

// Bootstrap is the address of the gateway under test.
func Bootstrap() string { return os.Getenv("COMPAT_BOOTSTRAP") }

// Main runs the scenarios named in COMPAT_SCENARIOS, or all, one after the other.
func Main(suite Suite) {
	version := flag.Bool("version", false, "print the version of the client library")
	flag.Parse()
	if *version {
		fmt.Println(libraryVersion(suite.Library))
		return
	}
	if options := os.Getenv(memberVariable); options != "" {
		os.Exit(runMemberProcess(suite.Join, options))
	}
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(os.Getenv("COMPAT_SCENARIOS"), ",") {
		if name != "" {
			wanted[name] = true
		}
	}
	for _, scenario := range suite.Scenarios {
		if len(wanted) == 0 || wanted[scenario.Name] {
			answer(runScenario(suite, scenario))
		}
	}
}

func libraryVersion(path string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == path {
				return dependency.Version
			}
		}
	}
	return "unknown"
}

type row struct {
	Scenario string  `json:"scenario"`
	Outcome  string  `json:"outcome"`
	Seconds  float64 `json:"seconds"`
	Detail   string  `json:"detail"`
}

func answer(row row) {
	line, err := json.Marshal(row)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}

func runScenario(suite Suite, scenario Scenario) row {
	if scenario.Skip != "" {
		return row{scenario.Name, "skipped", 0, scenario.Skip}
	}
	limit := scenario.Limit
	if limit == 0 {
		limit = defaultLimit
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	t := &T{Context: ctx, suite: suite, name: scenario.Name, unique: fmt.Sprintf("%d", time.Now().UnixNano()/1e6)}
	fmt.Fprintf(os.Stderr, "%s ==== %s\n", time.Now().Format(time.TimeOnly), scenario.Name)
	started := time.Now()
	ended := make(chan error, 1)
	go func() { ended <- t.run(scenario.Run) }()
	var err error
	select {
	case err = <-ended:
	case <-time.After(limit + stopGrace):
		// The scenario's goroutines keep running, because nothing can stop a client call that does not return.
		err = fmt.Errorf("hung: not ended %s after its limit of %s", stopGrace, limit)
	}
	seconds := time.Since(started).Seconds()
	if err != nil {
		return row{scenario.Name, "failed", seconds, err.Error()}
	}
	return row{scenario.Name, "passed", seconds, ""}
}

// T is one running scenario. Its Context ends at the scenario's limit.
type T struct {
	Context  context.Context
	suite    Suite
	name     string
	unique   string
	counter  atomic.Int64
	mu       sync.Mutex
	cleanups []func()
	problems []error
}

type failure struct{ error }

func (t *T) run(body func(*T)) (err error) {
	defer func() {
		if caught := recover(); caught != nil {
			if failed, ok := caught.(failure); ok {
				err = failed.error
			} else {
				err = fmt.Errorf("panic: %v\n%s", caught, debug.Stack())
			}
		}
		for i := len(t.cleanups) - 1; i >= 0; i-- {
			t.cleanups[i]()
		}
		err = errors.Join(append([]error{err}, t.problems...)...)
	}()
	body(t)
	return nil
}

// Failf ends the scenario. Only the scenario's own goroutine may call it; others call Problem.
func (t *T) Failf(format string, arguments ...any) {
	panic(failure{fmt.Errorf(format, arguments...)})
}

// Must ends the scenario if err is not nil.
func (t *T) Must(err error, what string) {
	if err != nil {
		t.Failf("%s: %w", what, err)
	}
}

// Problem makes the scenario fail once it has ended.
func (t *T) Problem(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.problems) < 5 {
		t.problems = append(t.problems, err)
	}
}

// Cleanup registers a function that runs after the scenario. The function that was registered last runs first.
func (t *T) Cleanup(cleanup func()) { t.cleanups = append(t.cleanups, cleanup) }

// NewName returns a name that no other scenario or run uses.
func (t *T) NewName(kind string) string {
	return fmt.Sprintf("%s-%s-%s-%d", t.suite.Name, kind, t.unique, t.counter.Add(1))
}

// Wait calls `pending` until it returns "". If that takes longer than `within`, Wait ends the scenario with the last
// result of `pending`.
func (t *T) Wait(what string, within time.Duration, pending func() string) {
	deadline := time.Now().Add(within)
	for {
		why := pending()
		if why == "" {
			return
		}
		if time.Now().After(deadline) || t.Context.Err() != nil {
			t.Failf("%s: not within %s: %s", what, within, why)
		}
		time.Sleep(pollEvery)
	}
}

// Restart and Kill make the runner restart the gateway, by SIGTERM or SIGKILL. They return once the gateway serves
// again.
func (t *T) Restart() { t.control("restart") }

func (t *T) Kill() { t.control("kill") }

func (t *T) control(action string) {
	address := os.Getenv("COMPAT_CONTROL") + "/" + action
	request, err := http.NewRequestWithContext(t.Context, http.MethodPost, address, nil)
	t.Must(err, action)
	response, err := http.DefaultClient.Do(request)
	t.Must(err, action)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	t.Must(err, action)
	if response.StatusCode != http.StatusOK {
		t.Failf("%s: %s: %s", action, response.Status, body)
	}
}

// NewLog opens the delivery log of this scenario, with `header` as its first line.
func (t *T) NewLog(header Header) *Log {
	path := filepath.Join(os.Getenv("COMPAT_DELIVERIES"), t.suite.Name+"."+t.name+".jsonl")
	log, err := newLog(path, header)
	t.Must(err, "delivery log")
	t.Cleanup(func() {
		if err := log.close(); err != nil {
			t.Problem(err)
		}
	})
	return log
}
