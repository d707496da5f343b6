// Command franz_go runs the scenarios that the Go suites share against the gateway. It uses franz-go's kgo and kadm,
// and kmsg for single requests.
package main

import (
	"slices"

	"compat"
)

func main() {
	groups := compat.GroupCase{
		Client:      open,
		Eager:       []string{"range", "roundrobin", "sticky"},
		Cooperative: "cooperative-sticky",
		TenRuns:     []string{"range", "cooperative-sticky"},
		ServerSide:  serverSide,
	}
	compat.Main(compat.Suite{
		Name:      "franz_go",
		Library:   "github.com/twmb/franz-go",
		Bootstrap: compat.Bootstrap(),
		Join:      join,
		Scenarios: slices.Concat(
			compat.DataScenarios(open),
			compat.TransactionScenarios(openTransactional),
			compat.AdminScenarios(open, join, "range"),
			groups.Scenarios(),
			compat.RawScenarios(open),
		),
	})
}

func open(t *compat.T) compat.Client { return openTransactional(t) }

func openTransactional(t *compat.T) compat.TransactionalClient {
	client, err := newClient()
	t.Must(err, "client")
	t.Cleanup(client.Close)
	return client
}
