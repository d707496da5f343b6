package compat

import (
	"fmt"
	"slices"
)

// AdminScenarios returns the canonical scenarios of the admin API.
func AdminScenarios(open func(*T) Client, join JoinFunc, assignor string) []Scenario {
	return []Scenario{
		{Name: "admin.topics", Run: func(t *T) { topics(t, open(t)) }},
		{Name: "admin.configs", Run: func(t *T) { configs(t, open(t)) }},
		{Name: "admin.groups", Run: func(t *T) { groups(t, open(t), join, assignor) }},
	}
}

func topics(t *T, client Client) {
	topic := newTopic(t, client, 2)
	expect := func(want int) {
		t.Wait("partitions", settleLimit, func() string {
			count, err := client.Partitions(t.Context, topic)
			t.Must(err, "describe topic")
			if count != want {
				return fmt.Sprintf("%d, not %d", count, want)
			}
			return ""
		})
	}
	expect(2)
	if err := client.CreateTopic(t.Context, topic, 2); err == nil {
		t.Failf("the same topic was created twice")
	}
	t.Must(client.AddPartitions(t.Context, topic, 5), "add partitions")
	expect(5)
	if err := client.AddPartitions(t.Context, topic, 3); err == nil {
		t.Failf("partitions were taken away")
	}
	_, err := client.Produce(t.Context, Partition{topic, 4}, []byte("new"))
	t.Must(err, "produce to a new partition")
	t.Must(client.DeleteTopic(t.Context, topic), "delete topic")
	expect(0)
	if err := client.DeleteTopic(t.Context, topic); err == nil {
		t.Failf("the same topic was deleted twice")
	}
}

func configs(t *T, client Client) {
	topic := newTopic(t, client, 1)
	before, err := client.TopicConfig(t.Context, topic)
	t.Must(err, "describe configs")
	for name, want := range map[string]string{"cleanup.policy": "delete", "retention.ms": "604800000"} {
		if before[name] != want {
			t.Failf("%s is %q by default", name, before[name])
		}
	}
	t.Must(client.SetTopicConfig(t.Context, topic, "retention.ms", "3600000"), "alter configs")
	after, err := client.TopicConfig(t.Context, topic)
	t.Must(err, "describe configs")
	if after["retention.ms"] != "3600000" || after["cleanup.policy"] != before["cleanup.policy"] {
		t.Failf("retention.ms is %q, cleanup.policy %q", after["retention.ms"], after["cleanup.policy"])
	}
	if err := client.SetTopicConfig(t.Context, topic, "retention.ms", "no number"); err == nil {
		t.Failf("retention.ms took a value that is no number")
	}
}

func groups(t *T, client Client, join JoinFunc, assignor string) {
	topic := newTopic(t, client, 1)
	group := t.NewName("group")
	partition := Partition{topic, 0}
	for range 5 {
		_, err := client.Produce(t.Context, partition, []byte("record"))
		t.Must(err, "produce")
	}
	member, err := join(Options{
		Name: "c1", Group: group, Topics: []string{topic}, Assignors: []string{assignor}, Commit: CommitAuto,
	}, Discard)
	t.Must(err, "join")
	t.Cleanup(func() { _ = member.Close() })
	t.Settled([]Partition{partition}, true, member)
	t.Wait("committed", settleLimit, func() string {
		offset, err := client.Committed(t.Context, group, partition)
		t.Must(err, "committed")
		if offset != 5 {
			return fmt.Sprintf("%d", offset)
		}
		return ""
	})
	described, err := client.DescribeGroup(t.Context, group)
	t.Must(err, "describe group")
	if described.State != "Stable" || described.ProtocolType != "consumer" || described.Protocol != assignor {
		t.Failf("described as %+v", described)
	}
	if len(described.Members) != 1 || described.Members[0].ID != member.MemberID() {
		t.Failf("described as %+v, the member is %s", described, member.MemberID())
	}
	if err := client.DeleteGroup(t.Context, group); err == nil {
		t.Failf("a group with a member was deleted")
	}
	t.Must(member.Close(), "close")
	described, err = client.DescribeGroup(t.Context, group)
	t.Must(err, "describe group")
	if described.State != "Empty" {
		t.Failf("described as %+v without members", described)
	}
	t.Must(client.AlterCommitted(t.Context, group, partition, 2), "alter offsets")
	offset, err := client.Committed(t.Context, group, partition)
	t.Must(err, "committed")
	if offset != 2 {
		t.Failf("committed %d after it was altered to 2", offset)
	}
	listed := func() bool {
		names, err := client.Groups(t.Context)
		t.Must(err, "list groups")
		return slices.Contains(names, group)
	}
	if !listed() {
		t.Failf("the group is not listed")
	}
	t.Must(client.DeleteGroup(t.Context, group), "delete group")
	if listed() {
		t.Failf("the group is listed after it was deleted")
	}
	offset, err = client.Committed(t.Context, group, partition)
	t.Must(err, "committed")
	if offset != -1 {
		t.Failf("committed %d in a group that was deleted", offset)
	}
}
