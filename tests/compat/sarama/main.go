// Command sarama runs the scenarios that the Go suites share, and Sarama's own scenarios, against the gateway.
package main

import (
	"os"
	"slices"

	"compat"

	"github.com/IBM/sarama"
)

// newest is the newest Kafka version that Sarama supports. The shared scenarios use this version.
var newest = sarama.MaxVersion

func main() {
	sarama.Logger = quiet{}
	if os.Getenv("COMPAT_DEBUG") != "" {
		sarama.Logger = verbose{}
	}
	join := joinAt(newest)
	groups := compat.GroupCase{
		Client:      open,
		Eager:       []string{"range", "roundrobin", "sticky"},
		Cooperative: "cooperative-sticky",
		Regex:       "Sarama subscribes to topics by name only",
		TenRuns:     []string{"sticky", "cooperative-sticky"},
	}
	compat.Main(compat.Suite{
		Name:      "sarama",
		Library:   "github.com/IBM/sarama",
		Bootstrap: compat.Bootstrap(),
		Join:      join,
		Scenarios: slices.Concat(
			compat.DataScenarios(open),
			compat.TransactionScenarios(openTransactional),
			compat.AdminScenarios(open, join, "range"),
			groups.Scenarios(),
			compat.RawScenarios(open),
			sharedClientScenarios(),
			seaweedScenarios(),
		),
	})
}

func open(t *compat.T) compat.Client { return openAt(t, newest) }

func openTransactional(t *compat.T) compat.TransactionalClient { return openAt(t, newest) }

func openAt(t *compat.T, version sarama.KafkaVersion) *client {
	client, err := newClient(version)
	t.Must(err, "client")
	t.Cleanup(client.Close)
	return client
}
