// Package kfake replaces franz-go's module of the same name in that module's own tests. A cluster of this package is a
// broker outside the test's process. The HTTP service at KFAKE_DOOR starts a fresh broker for each cluster. Clients
// reach the broker through a proxy, so that a test can observe requests and respond to some of them itself.
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

// Opt sets an option of a cluster.
type Opt func(*options)

// NumBrokers sets the number of brokers. The service at KFAKE_DOOR may start fewer.
func NumBrokers(n int) Opt { return func(o *options) { o.brokers = n } }

// BrokerConfigs sets broker configs by Kafka's names.
func BrokerConfigs(settings map[string]string) Opt {
	return func(o *options) {
		for name, value := range settings {
			o.settings[name] = value
		}
	}
}

// SeedTopics adds topics that NewCluster creates before it returns.
func SeedTopics(partitions int32, topics ...string) Opt {
	return func(o *options) { o.seeds = append(o.seeds, seed{partitions, topics}) }
}

// Cluster is a broker outside the test's process, and the proxy in front of it.
type Cluster struct {
	proxy  *proxy
	number string
	admin  *kadm.Client
}

// NewCluster requests a broker and creates the seed topics on it.
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

// ListenAddrs returns the bootstrap address for clients.
func (c *Cluster) ListenAddrs() []string { return []string{c.proxy.address()} }

// Close closes the proxy and the broker.
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
