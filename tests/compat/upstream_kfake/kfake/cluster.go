// Package kfake stands in the place of the module of this name: what its tests ask of a cluster is answered by a
// broker outside, of which each cluster gets a fresh one at the door that KFAKE_DOOR names. Clients reach it through a
// proxy, so that a test can look at requests and answer some of them itself.
package kfake

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const patience = 30 * time.Second

type options struct {
	brokers  int
	settings map[string]string
	seeds    []seed
}

type seed struct {
	partitions int32
	topics     []string
}

// Opt says what a cluster is to be like.
type Opt func(*options)

// NumBrokers is as many nodes as the door may give.
func NumBrokers(n int) Opt { return func(o *options) { o.brokers = n } }

// BrokerConfigs are settings by Kafka's names.
func BrokerConfigs(settings map[string]string) Opt {
	return func(o *options) {
		for name, value := range settings {
			o.settings[name] = value
		}
	}
}

// SeedTopics are there before the cluster is.
func SeedTopics(partitions int32, topics ...string) Opt {
	return func(o *options) { o.seeds = append(o.seeds, seed{partitions, topics}) }
}

// Cluster is a broker outside, and the proxy before it.
type Cluster struct {
	proxy  *proxy
	number string
	admin  *kadm.Client
}

// NewCluster asks for a broker and waits until it has the topics.
func NewCluster(opts ...Opt) (*Cluster, error) {
	wanted := options{brokers: 1, settings: map[string]string{}}
	for _, opt := range opts {
		opt(&wanted)
	}
	p, err := listen()
	if err != nil {
		return nil, err
	}
	var made struct{ Number, Bootstrap string }
	err = post("/open", map[string]any{
		"brokers": wanted.brokers, "settings": wanted.settings, "test": "", "advertise": p.address(),
	}, &made)
	if err != nil {
		p.close()
		return nil, err
	}
	p.serve(made.Bootstrap)
	c := &Cluster{proxy: p, number: made.Number}
	client, err := kgo.NewClient(kgo.SeedBrokers(p.address()))
	if err != nil {
		c.Close()
		return nil, err
	}
	c.admin = kadm.NewClient(client)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, seed := range wanted.seeds {
		created, err := c.admin.CreateTopics(ctx, seed.partitions, 1, nil, seed.topics...)
		if err == nil {
			err = created.Error()
		}
		if err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, nil
}

// ListenAddrs is where clients begin.
func (c *Cluster) ListenAddrs() []string { return []string{c.proxy.address()} }

// Close ends the broker too.
func (c *Cluster) Close() {
	if c.admin != nil {
		c.admin.Close()
	}
	c.proxy.close()
	if err := post("/close", map[string]any{"number": c.number}, nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

func post(path string, said, answer any) error {
	body, err := json.Marshal(said)
	if err != nil {
		return err
	}
	response, err := http.Post(os.Getenv("KFAKE_DOOR")+path, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}
