package main

import (
	"fmt"

	"compat"

	"github.com/IBM/sarama"
)

// sharedClientScenarios returns the scenario of several groups on one client. Sarama sends all requests of a client to
// a broker over one connection. So on that connection a parked JoinGroup of one group is ahead of the heartbeats of the
// other groups.
func sharedClientScenarios() []compat.Scenario {
	return []compat.Scenario{{Name: "sarama.groups-on-one-client", Run: groupsOnOneClient}}
}

func groupsOnOneClient(t *compat.T) {
	const groups = 3
	client := open(t)
	shared, err := sarama.NewClient([]string{compat.Bootstrap()}, sharedConfig())
	t.Must(err, "client")
	t.Cleanup(func() { _ = shared.Close() })
	log := t.NewLog(compat.Header{Mode: "eager", Partitions: 2})
	var scenes []*compat.Scene
	var members []compat.Consumer
	var flow *compat.Flow
	for i := range groups {
		scene := &compat.Scene{
			T: t, Client: client, Log: log, Topic: t.NewName("topic"), Group: t.NewName("group"),
			Assignors: []string{"range"}, Commit: compat.CommitAuto, Join: joinAt(newest),
		}
		t.Must(client.CreateTopic(t.Context, scene.Topic, 2), "create topic")
		group, err := sarama.NewConsumerGroupFromClient(scene.Group, shared)
		t.Must(err, "group")
		member := consume(group, scene.Options(fmt.Sprintf("shared-%d", i+1)), log)
		t.Cleanup(func() { _ = member.Close() })
		scenes, members = append(scenes, scene), append(members, member)
		partitions := compat.PartitionsOf(scene.Topic, 2)
		if flow == nil {
			flow = compat.StartFlow(t, client, log, false, partitions...)
		} else {
			for _, partition := range partitions {
				flow.Add(partition)
			}
		}
	}
	for i, scene := range scenes {
		t.Settled(compat.PartitionsOf(scene.Topic, 2), true, members[i])
	}
	flow.Steady()
	// One group rebalances. The sessions of the other two groups must survive, in the same generation.
	before := []int32{members[1].Generation(), members[2].Generation()}
	guest := scenes[0].Member("guest")
	t.Settled(compat.PartitionsOf(scenes[0].Topic, 2), true, members[0], guest)
	flow.Steady()
	t.Must(guest.Close(), "close")
	t.Settled(compat.PartitionsOf(scenes[0].Topic, 2), true, members[0])
	flow.Steady()
	if after := []int32{members[1].Generation(), members[2].Generation()}; after[0] != before[0] || after[1] != before[1] {
		t.Failf("generations of the other groups went from %v to %v", before, after)
	}
	flow.Drain()
	for _, member := range members {
		t.Must(member.Close(), "close")
	}
}

func sharedConfig() *sarama.Config {
	config := newConfig(newest)
	config.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategyRange()}
	return config
}
