package main

import (
	"fmt"
	"time"

	"compat"

	"github.com/IBM/sarama"
)

// seaweedVersions are the Kafka versions with which the SeaweedFS gateway was tested, and Sarama's newest. The
// scenarios below come from the consumer group tests of that gateway. Where those tests check the sum over all
// consumers, the scenarios check each consumer: each one must be ready and own the right partitions before the next
// step.
var seaweedVersions = []struct {
	name    string
	version sarama.KafkaVersion
}{
	{"V2_6_0_0", sarama.V2_6_0_0},
	{"V2_8_0_0", sarama.V2_8_0_0},
	{"V3_4_0_0", sarama.V3_4_0_0},
	{"newest", newest},
}

// seaweedReady is how long the tests of SeaweedFS wait for a group to settle.
const seaweedReady = 45 * time.Second

func seaweedScenarios() []compat.Scenario {
	scenarios := []struct {
		name string
		run  func(*compat.T, sarama.KafkaVersion)
	}{
		{"basic-functionality", seaweedBasic},
		{"offset-commit-and-fetch", seaweedOffsets},
		{"single-consumer-all-partitions", seaweedSingle},
		{"two-consumers-rebalance", seaweedTwo},
		{"consumer-leave-rebalance", seaweedLeave},
		{"multiple-consumers-join", seaweedJoin},
		{"consumer-group-resumption", seaweedResumption},
		{"produce-and-consume", seaweedProduce},
	}
	var all []compat.Scenario
	for _, version := range seaweedVersions {
		for _, scenario := range scenarios {
			all = append(all, compat.Scenario{
				Name: "seaweed." + version.name + "." + scenario.name,
				Run:  func(t *compat.T) { scenario.run(t, version.version) },
			})
		}
	}
	return all
}

func seaweedScene(t *compat.T, version sarama.KafkaVersion, partitions int) *compat.Scene {
	return compat.NewScene(t, openAt(t, version), joinAt(version), compat.SceneOptions{
		Partitions: partitions, Assignors: []string{"range"}, Mode: "eager",
	})
}

// ready waits until Sarama has called Setup of each of the members.
func ready(t *compat.T, members ...compat.Consumer) {
	for i, member := range members {
		t.Wait(fmt.Sprintf("consumer %d is set up", i+1), seaweedReady, func() string {
			if member.(*consumer).Setups() == 0 {
				return "no session"
			}
			return ""
		})
	}
}

func produce(t *compat.T, scene *compat.Scene, count int) {
	for i := range count {
		partition := scene.Partitions()[i%len(scene.Partitions())]
		offset, err := scene.Client.Produce(t.Context, partition, fmt.Appendf(nil, "%d", i))
		t.Must(err, "produce")
		scene.Log.Write(compat.Event{Kind: "produced", Topic: scene.Topic, Partition: partition.Index, Offset: offset})
	}
}

func delivered(t *compat.T, scene *compat.Scene, count int) {
	t.Wait("records delivered", seaweedReady, func() string {
		if got := scene.Log.Delivered(); got < count || scene.Log.Missing() > 0 {
			return fmt.Sprintf("%d of %d, %d missing", got, count, scene.Log.Missing())
		}
		return ""
	})
	if got := scene.Log.Delivered(); got != count {
		t.Failf("%d deliveries of %d records", got, count)
	}
}

func seaweedBasic(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 1)
	produce(t, scene, 9)
	members := []compat.Consumer{scene.Member("c1"), scene.Member("c2"), scene.Member("c3")}
	ready(t, members...)
	scene.Settled(members...)
	delivered(t, scene, 9)
	scene.Close(members...)
}

func seaweedOffsets(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 1)
	produce(t, scene, 3)
	first := scene.Member("c1")
	ready(t, first)
	delivered(t, scene, 3)
	scene.Close(first)
	offset, err := scene.Client.Committed(t.Context, scene.Group, scene.Partitions()[0])
	t.Must(err, "committed")
	if offset != 3 {
		t.Failf("committed %d of 3", offset)
	}
	produce(t, scene, 2)
	second := scene.Member("c2")
	ready(t, second)
	delivered(t, scene, 5)
	scene.Close(second)
}

func seaweedSingle(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 4)
	member := scene.Member("c1")
	ready(t, member)
	scene.Settled(member)
	produce(t, scene, 8)
	delivered(t, scene, 8)
	scene.Close(member)
}

func seaweedTwo(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 4)
	flow := compat.StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first := scene.Member("c1")
	ready(t, first)
	scene.Settled(first)
	flow.Moves()
	second := scene.Member("c2")
	ready(t, second)
	scene.Settled(first, second)
	flow.Moves()
	flow.Drain()
	scene.Close(first, second)
}

func seaweedLeave(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 4)
	flow := compat.StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first, second := scene.PatientMember("c1"), scene.PatientMember("c2")
	ready(t, first, second)
	scene.Settled(first, second)
	flow.Moves()
	scene.Close(second)
	// The time limit is shorter than a session. If the gateway did not understand the LeaveGroup, the hand-over would
	// take a whole session.
	t.SettledWithin(compat.SoonLimit, scene.Partitions(), true, first)
	flow.Moves()
	flow.Drain()
	scene.Close(first)
}

func seaweedJoin(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 4)
	flow := compat.StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	var members []compat.Consumer
	for i := range 4 {
		members = append(members, scene.Member(fmt.Sprintf("c%d", i+1)))
	}
	ready(t, members...)
	scene.Settled(members...)
	flow.Moves()
	scene.Settled(members...)
	flow.Drain()
	scene.Close(members...)
}

func seaweedResumption(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 2)
	for run := range 3 {
		produce(t, scene, 4)
		member := scene.Member(fmt.Sprintf("c%d", run+1))
		ready(t, member)
		delivered(t, scene, 4*(run+1))
		scene.Close(member)
	}
}

func seaweedProduce(t *compat.T, version sarama.KafkaVersion) {
	scene := seaweedScene(t, version, 1)
	produce(t, scene, 3)
	messages, err := scene.Client.Read(t.Context, scene.Partitions()[0], 0, 3)
	t.Must(err, "read")
	for i, message := range messages {
		if string(message.Value) != fmt.Sprint(i) {
			t.Failf("offset %d holds %s", i, message.Value)
		}
		scene.Log.Write(compat.Event{
			Kind: "delivered", Member: "reader", Topic: scene.Topic, Offset: message.Offset,
		})
	}
}
