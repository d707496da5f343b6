package compat

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// GroupCase describes a client for the group scenarios.
type GroupCase struct {
	Client      func(t *T) Client
	Eager       []string // eager assignors
	Cooperative string   // "" if the client has none
	Regex       string   // why the client has no pattern subscriptions; "" if it has them
	TenRuns     []string // assignors for which a ten-runs scenario exists
	// ServerSide, listed among a member's assignors, means the consumer protocol (KIP-848), in which the coordinator
	// assigns. It is "" if the client does not have that protocol.
	ServerSide string
}

// Scenarios returns the canonical scenarios of consumer groups.
func (c GroupCase) Scenarios() []Scenario {
	var scenarios []Scenario
	add := func(name string, run func(*T)) {
		scenarios = append(scenarios, Scenario{Name: "groups." + name, Run: run})
	}
	skip := func(name, reason string) {
		scenarios = append(scenarios, Scenario{Name: "groups." + name, Skip: reason})
	}
	for _, assignor := range c.assignors() {
		add(assignor+".1-2-4", func(t *T) { c.oneTwoFour(t, assignor) })
	}
	for _, assignor := range c.TenRuns {
		scenarios = append(scenarios, Scenario{
			Name: "groups." + assignor + ".ten-runs", Limit: 3 * time.Minute, Run: func(t *T) { c.tenRuns(t, assignor) },
		})
	}
	add("one-partition-three-consumers", c.onePartitionThreeConsumers)
	add("leave", c.leave)
	add("crash", c.crash)
	add("crash-half-open", c.crashHalfOpen)
	add("gateway-restart", func(t *T) { c.outage(t, t.Restart) })
	add("gateway-kill", func(t *T) { c.outage(t, t.Kill) })
	add("commit-resume", c.commitResume)
	add("commit-in-revoke", c.commitInRevoke)
	add("static-members", c.staticMembers)
	if c.Cooperative == "" {
		skip("cooperative", "the client has no cooperative assignor")
		skip("rolling-upgrade", "the client has no cooperative assignor")
	} else {
		add("cooperative", c.cooperative)
		scenarios = append(scenarios, Scenario{Name: "groups.rolling-upgrade", Limit: 2 * time.Minute, Run: c.rollingUpgrade})
	}
	add("partition-added", c.partitionAdded)
	add("topic-deleted", c.topicDeleted)
	if c.Regex == "" {
		add("regex", c.regex)
	} else {
		skip("regex", c.Regex)
	}
	add("subscription-change", c.subscriptionChange)
	add("same-client-id", c.sameClientID)
	if c.ServerSide != "" {
		scenarios = append(scenarios, c.serverSide()...)
	}
	return scenarios
}

// serverSide returns the scenarios for groups of the consumer protocol. They repeat the scenarios in which something
// happens to members or to the gateway. The scenarios of assignors and of the fencing of static members apply only to
// the classic protocol.
func (c GroupCase) serverSide() []Scenario {
	c.Eager, c.Cooperative, c.ServerSide = []string{c.ServerSide}, c.ServerSide, ""
	var scenarios []Scenario
	add := func(name string, run func(*T)) {
		scenarios = append(scenarios, Scenario{Name: "consumer-protocol." + name, Run: run})
	}
	add("1-2-4", func(t *T) { c.oneTwoFour(t, c.Cooperative) })
	add("leave", c.leave)
	add("crash", c.crash)
	add("crash-half-open", c.crashHalfOpen)
	add("gateway-restart", func(t *T) { c.outage(t, t.Restart) })
	add("gateway-kill", func(t *T) { c.outage(t, t.Kill) })
	add("commit-resume", c.commitResume)
	add("commit-in-revoke", c.commitInRevoke)
	add("cooperative", c.cooperative)
	add("partition-added", c.partitionAdded)
	add("topic-deleted", c.topicDeleted)
	add("regex", c.regex)
	add("subscription-change", c.subscriptionChange)
	return scenarios
}

func (c GroupCase) assignors() []string {
	if c.Cooperative == "" {
		return c.Eager
	}
	return append(slices.Clone(c.Eager), c.Cooperative)
}

func (c GroupCase) mode(assignor string) string {
	if assignor == c.Cooperative {
		return "cooperative"
	}
	return "eager"
}

// Scene is a topic, a group that reads it, and the delivery log of the group's members.
type Scene struct {
	T          *T
	Client     Client
	Log        *Log
	Topic      string
	Group      string
	Assignors  []string
	Commit     Commit
	Join       JoinFunc
	partitions int
}

// SceneOptions are the options of a scene. A scenario sets only the options that matter to it.
type SceneOptions struct {
	Partitions        int
	Assignors         []string
	Mode              string
	RedeliveryAllowed bool
	Commit            Commit
}

// NewScene creates a topic and opens a delivery log.
func NewScene(t *T, client Client, join JoinFunc, options SceneOptions) *Scene {
	scene := &Scene{
		T: t, Client: client, Topic: t.NewName("topic"), Group: t.NewName("group"), Assignors: options.Assignors,
		Commit: options.Commit, Join: join, partitions: options.Partitions,
	}
	if scene.Commit == "" {
		scene.Commit = CommitAuto
	}
	t.Must(client.CreateTopic(t.Context, scene.Topic, options.Partitions), "create topic")
	scene.Log = t.NewLog(Header{
		Mode: options.Mode, RedeliveryAllowed: options.RedeliveryAllowed, Topic: scene.Topic, Partitions: options.Partitions,
	})
	return scene
}

func (c GroupCase) scene(t *T, partitions int, assignor string, redeliveryAllowed bool) *Scene {
	return NewScene(t, c.Client(t), t.suite.Join, SceneOptions{
		Partitions: partitions, Assignors: []string{assignor}, Mode: c.mode(assignor), RedeliveryAllowed: redeliveryAllowed,
	})
}

// Partitions returns the partitions of the scene's topic.
func (s *Scene) Partitions() []Partition { return PartitionsOf(s.Topic, s.partitions) }

// PartitionsOf returns the first `count` partitions of a topic.
func PartitionsOf(topic string, count int) []Partition {
	partitions := make([]Partition, count)
	for i := range partitions {
		partitions[i] = Partition{topic, int32(i)}
	}
	return partitions
}

// Options returns the options of a member that reads the scene's topic.
func (s *Scene) Options(name string) Options {
	return Options{Name: name, Group: s.Group, Topics: []string{s.Topic}, Assignors: s.Assignors, Commit: s.Commit}
}

// Member starts a member in this process.
func (s *Scene) Member(name string) Consumer { return s.Start(s.Options(name)) }

// PatientMember starts a member with a long session in this process.
func (s *Scene) PatientMember(name string) Consumer {
	options := s.Options(name)
	options.LongSession = true
	return s.Start(options)
}

// Start starts a member with these options in this process.
func (s *Scene) Start(options Options) Consumer {
	consumer, err := s.Join(options, s.Log)
	s.T.Must(err, "member "+options.Name)
	s.T.Cleanup(func() { _ = consumer.Close() }) // a scenario that checks the error closes the member itself
	return consumer
}

// Close closes the members one after the other.
func (s *Scene) Close(members ...Consumer) {
	for _, member := range members {
		s.T.Must(member.Close(), "close")
	}
}

// Settled waits until every partition of the scene has exactly one owner, no member owns two partitions more than
// another, and all members are in the same generation.
func (s *Scene) Settled(members ...Consumer) { s.T.Settled(s.Partitions(), true, members...) }

// Settled waits for the same with any set of partitions. If `even` is not set, the members may own different numbers of
// partitions.
func (t *T) Settled(partitions []Partition, even bool, members ...Consumer) {
	t.SettledWithin(settleLimit, partitions, even, members...)
}

// SettledWithin is Settled with a time limit of its own.
func (t *T) SettledWithin(within time.Duration, partitions []Partition, even bool, members ...Consumer) {
	want := sortPartitions(slices.Clone(partitions))
	t.Wait("group settled", within, func() string {
		var all []Partition
		var counts []int
		var generations []int32
		for _, member := range members {
			if err := member.Err(); err != nil {
				t.Failf("member ended: %w", err)
			}
			owned := member.Owned()
			all = append(all, owned...)
			counts = append(counts, len(owned))
			if generation := member.Generation(); generation >= 0 {
				generations = append(generations, generation)
			}
		}
		state := fmt.Sprintf("%v owned, generations %v", counts, generations)
		switch {
		case !slices.Equal(sortPartitions(all), want):
			return state
		case even && slices.Max(counts)-slices.Min(counts) > 1:
			return state + ": uneven"
		case len(generations) > 0 && slices.Min(generations) != slices.Max(generations):
			return state
		}
		return ""
	})
}

func (c GroupCase) oneTwoFour(t *T, assignor string) {
	scene := c.scene(t, 4, assignor, false)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first := scene.Member("c1")
	scene.Settled(first)
	flow.Steady()
	second := scene.Member("c2")
	scene.Settled(first, second)
	flow.Steady()
	third, fourth := scene.Member("c3"), scene.Member("c4")
	scene.Settled(first, second, third, fourth)
	flow.Steady()
	scene.Close(second, third, fourth)
	scene.Settled(first)
	flow.Steady()
	flow.Drain()
	scene.Close(first)
}

func (c GroupCase) tenRuns(t *T, assignor string) {
	client := c.Client(t)
	log := t.NewLog(Header{Mode: c.mode(assignor), Partitions: 4})
	for run := range 10 {
		scene := &Scene{
			T: t, Client: client, Log: log, Topic: t.NewName("topic"), Group: t.NewName("group"),
			Assignors: []string{assignor}, Commit: CommitAuto, Join: t.suite.Join, partitions: 4,
		}
		t.Must(client.CreateTopic(t.Context, scene.Topic, 4), "create topic")
		flow := StartFlow(t, client, log, false, scene.Partitions()...)
		name := func(member int) string { return fmt.Sprintf("run%d-c%d", run+1, member) }
		members := []Consumer{scene.Member(name(1))}
		scene.Settled(members...)
		members = append(members, scene.Member(name(2)))
		scene.Settled(members...)
		members = append(members, scene.Member(name(3)), scene.Member(name(4)))
		scene.Settled(members...)
		flow.Moves()
		flow.Drain()
		scene.Close(members...)
	}
}

func (c GroupCase) onePartitionThreeConsumers(t *T) {
	scene := c.scene(t, 1, c.Eager[0], false)
	members := []Consumer{scene.Member("c1"), scene.Member("c2"), scene.Member("c3")}
	t.Wait("three members", settleLimit, func() string { return c.members(t, scene, 3) })
	scene.Settled(members...)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	flow.Steady()
	flow.Drain()
	scene.Close(members...)
}

func (c GroupCase) members(t *T, scene *Scene, count int) string {
	group, err := scene.Client.DescribeGroup(t.Context, scene.Group)
	if err != nil {
		return err.Error() // the group exists once its first member has joined
	}
	if group.State != "Stable" || len(group.Members) != count {
		return fmt.Sprintf("%s with %d members", group.State, len(group.Members))
	}
	return ""
}

func (c GroupCase) leave(t *T) {
	scene := c.scene(t, 4, c.Eager[0], false)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first, second := scene.PatientMember("c1"), scene.PatientMember("c2")
	scene.Settled(first, second)
	flow.Steady()
	scene.Close(second)
	// SoonLimit is well below the session timeout, so the LeaveGroup has caused the hand-over.
	t.SettledWithin(SoonLimit, scene.Partitions(), true, first)
	flow.Steady()
	flow.Drain()
	scene.Close(first)
}

func (c GroupCase) crash(t *T) {
	scene := c.scene(t, 4, c.Eager[0], true)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first, second := scene.Member("c1"), t.StartMember(scene.Options("c2"), scene.Log)
	scene.Settled(first, second)
	flow.Steady()
	second.Kill()
	scene.Settled(first)
	flow.Steady()
	flow.Drain()
	scene.Close(first)
}

func (c GroupCase) crashHalfOpen(t *T) {
	scene := c.scene(t, 4, c.Eager[0], true)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first, second := scene.Member("c1"), t.StartMember(scene.Options("c2"), scene.Log)
	scene.Settled(first, second)
	flow.Steady()
	t.Must(second.Stop(), "stop")
	scene.Settled(first)
	flow.Steady()
	t.Must(second.Continue(), "continue")
	scene.Settled(first, second)
	flow.Steady()
	flow.Drain()
	scene.Close(second, first)
}

func (c GroupCase) outage(t *T, away func()) {
	scene := c.scene(t, 4, c.Eager[0], true)
	flow := StartFlow(t, scene.Client, scene.Log, true, scene.Partitions()...)
	first, second := scene.Member("c1"), scene.Member("c2")
	scene.Settled(first, second)
	flow.Steady()
	away()
	flow.Steady()
	scene.Settled(first, second)
	flow.Steady()
	flow.Drain()
	scene.Close(second, first)
}

func (c GroupCase) commitResume(t *T) {
	scene := c.scene(t, 1, c.Eager[0], false)
	produce := func(count int) {
		for i := range count {
			offset, err := scene.Client.Produce(t.Context, scene.Partitions()[0], fmt.Appendf(nil, "%d", i))
			t.Must(err, "produce")
			scene.Log.Write(Event{Kind: "produced", Topic: scene.Topic, Offset: offset})
		}
	}
	delivered := func(count int) {
		t.Wait("records delivered", drainLimit, func() string {
			if scene.Log.Missing() > 0 || scene.Log.Delivered() < count {
				return fmt.Sprintf("%d of %d", scene.Log.Delivered(), count)
			}
			return ""
		})
	}
	produce(10)
	first := scene.Member("c1")
	delivered(10)
	scene.Close(first)
	committed, err := scene.Client.Committed(t.Context, scene.Group, scene.Partitions()[0])
	t.Must(err, "committed")
	if committed != 10 {
		t.Failf("committed %d, not 10", committed)
	}
	produce(10)
	second := scene.Member("c2")
	delivered(20)
	scene.Close(second)
	if scene.Log.Delivered() != 20 {
		t.Failf("%d deliveries of 20 records", scene.Log.Delivered())
	}
}

func (c GroupCase) commitInRevoke(t *T) {
	assignors := []string{c.Eager[0]}
	if c.Cooperative != "" && c.Cooperative != c.Eager[0] {
		assignors = append(assignors, c.Cooperative)
	}
	log := t.NewLog(Header{Mode: "eager", Partitions: 4})
	for _, assignor := range assignors {
		scene := &Scene{
			T: t, Client: c.Client(t), Log: log, Topic: t.NewName("topic"), Group: t.NewName("group"),
			Assignors: []string{assignor}, Commit: CommitInRevoke, Join: t.suite.Join, partitions: 4,
		}
		t.Must(scene.Client.CreateTopic(t.Context, scene.Topic, 4), "create topic")
		flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
		first := scene.Member(assignor + "-c1")
		scene.Settled(first)
		flow.Steady()
		second := scene.Member(assignor + "-c2")
		scene.Settled(first, second)
		flow.Steady()
		scene.Close(first)
		scene.Settled(second)
		flow.Steady()
		flow.Drain()
		scene.Close(second)
	}
}

func (c GroupCase) staticMembers(t *T) {
	scene := c.scene(t, 4, c.Eager[0], false)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	static := func(name, instance string) Options {
		options := scene.Options(name)
		options.Instance = instance
		return options
	}
	first, second := scene.Start(static("c1", "one")), scene.Start(static("c2", "two"))
	scene.Settled(first, second)
	flow.Steady()
	generation, kept := first.Generation(), second.Owned()
	scene.Close(second)
	again := scene.Start(static("c2-again", "two"))
	scene.Settled(first, again)
	flow.Steady()
	if first.Generation() != generation || !slices.Equal(again.Owned(), kept) {
		t.Failf("restart of a static member: generation %d became %d, partitions %v became %v",
			generation, first.Generation(), kept, again.Owned())
	}
	flow.Drain()
	scene.Close(again, first)
	c.fenced(t, scene)
}

// fenced discards the deliveries, because both members own the partitions until the older one is fenced.
func (c GroupCase) fenced(t *T, scene *Scene) {
	options := scene.Options("old")
	options.Group, options.Instance = t.NewName("group"), "same"
	older, err := t.suite.Join(options, Discard)
	t.Must(err, "join")
	t.Cleanup(func() { _ = older.Close() })
	t.Settled(scene.Partitions(), true, older)
	options.Name = "new"
	newer, err := t.suite.Join(options, Discard)
	t.Must(err, "join")
	t.Cleanup(func() { _ = newer.Close() })
	t.Settled(scene.Partitions(), true, newer)
	t.Wait("the older one is fenced", settleLimit, func() string {
		if older.Err() == nil {
			return "no error"
		}
		return ""
	})
	if err := older.Err(); !errors.Is(err, ErrFenced) {
		t.Failf("the older one ended with: %w", err)
	}
}

func (c GroupCase) cooperative(t *T) {
	scene := c.scene(t, 6, c.Cooperative, false)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	var members []Consumer
	var before [][]Partition
	for i := range 3 {
		members = append(members, scene.Member(fmt.Sprintf("c%d", i+1)))
		scene.Settled(members...)
		flow.Steady()
		for j, owned := range before {
			for _, partition := range members[j].Owned() {
				if !slices.Contains(owned, partition) {
					t.Failf("c%d gained %s when c%d joined", j+1, partition, i+1)
				}
			}
		}
		before = nil
		for _, member := range members {
			before = append(before, member.Owned())
		}
	}
	flow.Drain()
	scene.Close(members...)
}

func (c GroupCase) rollingUpgrade(t *T) {
	scene := NewScene(t, c.Client(t), t.suite.Join, SceneOptions{
		Partitions: 6, Assignors: []string{"range"}, Mode: "eager",
	})
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	members := []Consumer{scene.Member("eager-c1"), scene.Member("eager-c2"), scene.Member("eager-c3")}
	scene.Settled(members...)
	c.expectProtocol(t, scene, "range")
	bounces := []struct {
		name      string
		assignors []string
	}{{"both", []string{c.Cooperative, "range"}}, {"cooperative", []string{c.Cooperative}}}
	for bounce, step := range bounces {
		for i := range members {
			scene.Close(members[i])
			scene.Assignors = step.assignors
			members[i] = scene.Member(fmt.Sprintf("%s-c%d", step.name, i+1))
			scene.Settled(members...)
			flow.Steady()
			if bounce == 0 && i < len(members)-1 {
				c.expectProtocol(t, scene, "range") // at least one member still offers only range
			}
		}
		c.expectProtocol(t, scene, c.Cooperative)
	}
	flow.Drain()
	scene.Close(members...)
}

func (c GroupCase) expectProtocol(t *T, scene *Scene, protocol string) {
	t.Wait("protocol "+protocol, settleLimit, func() string {
		group, err := scene.Client.DescribeGroup(t.Context, scene.Group)
		t.Must(err, "describe group")
		if group.State != "Stable" || group.Protocol != protocol {
			return fmt.Sprintf("%s with %q", group.State, group.Protocol)
		}
		return ""
	})
}

func (c GroupCase) partitionAdded(t *T) {
	scene := c.scene(t, 2, c.assignors()[len(c.assignors())-1], false)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first, second := scene.Member("c1"), scene.Member("c2")
	scene.Settled(first, second)
	flow.Steady()
	t.Must(scene.Client.AddPartitions(t.Context, scene.Topic, 4), "add partitions")
	old := scene.Partitions()
	scene.partitions = 4
	scene.Settled(first, second)
	for _, partition := range scene.Partitions()[len(old):] {
		flow.Add(partition)
	}
	flow.Steady()
	flow.Drain()
	scene.Close(second, first)
}

func (c GroupCase) topicDeleted(t *T) {
	scene := c.scene(t, 2, c.Eager[0], false)
	other := t.NewName("doomed")
	t.Must(scene.Client.CreateTopic(t.Context, other, 2), "create topic")
	options := scene.Options("c1")
	options.Topics = append(options.Topics, other)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	member := scene.Start(options)
	t.Settled(append(scene.Partitions(), PartitionsOf(other, 2)...), false, member)
	flow.Steady()
	t.Must(scene.Client.DeleteTopic(t.Context, other), "delete topic")
	scene.Settled(member)
	flow.Steady()
	flow.Drain()
	scene.Close(member)
}

func (c GroupCase) regex(t *T) {
	scene := c.scene(t, 2, c.assignors()[len(c.assignors())-1], false)
	options := scene.Options("c1")
	options.Topics, options.Pattern = nil, "^"+scene.Topic+".*"
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	member := scene.Start(options)
	scene.Settled(member)
	flow.Steady()
	later := scene.Topic + "-later"
	t.Must(scene.Client.CreateTopic(t.Context, later, 2), "create topic")
	t.Settled(append(scene.Partitions(), PartitionsOf(later, 2)...), true, member)
	for _, partition := range PartitionsOf(later, 2) {
		flow.Add(partition)
	}
	flow.Steady()
	flow.Drain()
	scene.Close(member)
}

func (c GroupCase) subscriptionChange(t *T) {
	scene := c.scene(t, 2, c.Eager[0], false)
	other := t.NewName("other")
	t.Must(scene.Client.CreateTopic(t.Context, other, 2), "create topic")
	both := append(scene.Partitions(), PartitionsOf(other, 2)...)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	first, second := scene.Member("c1"), scene.Member("c2")
	scene.Settled(first, second)
	flow.Steady()
	id := first.MemberID()
	first.SetTopics([]string{scene.Topic, other})
	t.Settled(both, false, first, second)
	for _, partition := range PartitionsOf(other, 2) {
		flow.Add(partition)
	}
	flow.Steady()
	for _, partition := range second.Owned() {
		if partition.Topic == other {
			t.Failf("c2 owns %s, which it did not subscribe to", partition)
		}
	}
	flow.Drain()
	first.SetTopics([]string{scene.Topic})
	scene.Settled(first, second)
	if first.MemberID() != id {
		t.Failf("the change of topics made member %s into %s", id, first.MemberID())
	}
	scene.Close(second, first)
}

func (c GroupCase) sameClientID(t *T) {
	scene := c.scene(t, 3, c.Eager[0], false)
	flow := StartFlow(t, scene.Client, scene.Log, false, scene.Partitions()...)
	members := []Consumer{scene.Member("c1"), scene.Member("c2"), scene.Member("c3")}
	scene.Settled(members...)
	flow.Steady()
	t.Wait("three members", settleLimit, func() string { return c.members(t, scene, 3) })
	group, err := scene.Client.DescribeGroup(t.Context, scene.Group)
	t.Must(err, "describe group")
	ids, clients := map[string]bool{}, map[string]bool{}
	for _, member := range group.Members {
		ids[member.ID], clients[member.ClientID] = true, true
	}
	if len(ids) != 3 || len(clients) != 1 {
		t.Failf("members %v of clients %v", ids, clients)
	}
	flow.Drain()
	scene.Close(members...)
}
