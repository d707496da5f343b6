package compat

import (
	"bytes"
	"fmt"
)

// Error codes of the protocol that the raw scenarios distinguish.
const (
	NoError             = int16(0)
	UnknownMemberID     = int16(25)
	RebalanceInProgress = int16(27)
	MemberIDRequired    = int16(79)
)

// JoinAnswer is the response to a JoinGroup request.
type JoinAnswer struct {
	Code       int16
	Generation int32
	Member     string
	Leader     string
	Protocol   string
	Members    map[string][]byte // metadata by member id; only in the leader's response
}

// SyncAnswer is the response to a SyncGroup request.
type SyncAnswer struct {
	Code       int16
	Assignment []byte
}

// RawMember sends single requests on its own connection. Its methods return a response with an error code as a
// response. They return an error only if no response arrives.
type RawMember interface {
	Join(member, protocolType, protocol string, metadata []byte) (JoinAnswer, error)
	Sync(generation int32, member, protocolType, protocol string, assignments map[string][]byte) (SyncAnswer, error)
	Heartbeat(generation int32, member string) (int16, error)
	// Leave sends a LeaveGroup of this version with these members. Versions 0 to 2 have only one member. Leave returns
	// the top-level error code and, from version 3, one error code per member.
	Leave(version int16, members ...string) (code int16, memberCodes []int16, err error)
	Close()
}

// MaxLeaveVersion is the newest version of Kafka's LeaveGroup.
const MaxLeaveVersion = 5

// RawScenarios returns scenarios that send single requests of the group protocol.
func RawScenarios(open func(*T) Client) []Scenario {
	return []Scenario{
		{Name: "groups.leave-versions", Run: func(t *T) { leaveVersions(t, open(t)) }},
		{Name: "groups.connect-and-sr", Run: func(t *T) { connectAndSchemaRegistry(t, open(t)) }},
	}
}

// enter joins as a client does: first with `member`, which may be empty, and again with the member id that the broker
// assigns if the broker requires one.
func enter(t *T, raw RawMember, member, protocolType, protocol string, metadata []byte) JoinAnswer {
	answer, err := raw.Join(member, protocolType, protocol, metadata)
	t.Must(err, "join")
	if answer.Code == MemberIDRequired {
		answer, err = raw.Join(answer.Member, protocolType, protocol, metadata)
		t.Must(err, "join")
	}
	if answer.Code != NoError {
		t.Failf("join: error %d", answer.Code)
	}
	return answer
}

func openMember(t *T, client Client, group string) RawMember {
	raw, err := client.Member(group)
	t.Must(err, "connection")
	t.Cleanup(raw.Close)
	return raw
}

func syncGroup(t *T, raw RawMember, join JoinAnswer, protocolType string, assignments map[string][]byte) []byte {
	answer, err := raw.Sync(join.Generation, join.Member, protocolType, join.Protocol, assignments)
	t.Must(err, "sync")
	if answer.Code != NoError {
		t.Failf("sync: error %d", answer.Code)
	}
	return answer.Assignment
}

func leaveVersions(t *T, client Client) {
	for version := range int16(MaxLeaveVersion + 1) {
		group := t.NewName("group")
		raw := openMember(t, client, group)
		join := enter(t, raw, "", "test", "opaque", []byte("metadata"))
		syncGroup(t, raw, join, "test", map[string][]byte{join.Member: []byte("assignment")})
		code, members, err := raw.Leave(version, "unknown")
		t.Must(err, "leave")
		if wrong := leaveCodes(version, code, members, UnknownMemberID); wrong != "" {
			t.Failf("LeaveGroup v%d of an unknown member: %s", version, wrong)
		}
		code, members, err = raw.Leave(version, join.Member)
		t.Must(err, "leave")
		if wrong := leaveCodes(version, code, members, NoError); wrong != "" {
			t.Failf("LeaveGroup v%d: %s", version, wrong)
		}
		described, err := client.DescribeGroup(t.Context, group)
		t.Must(err, "describe group")
		if described.State != "Empty" || len(described.Members) != 0 {
			t.Failf("after LeaveGroup v%d: %+v", version, described)
		}
		beat, err := raw.Heartbeat(join.Generation, join.Member)
		t.Must(err, "heartbeat")
		if beat != UnknownMemberID {
			t.Failf("heartbeat after LeaveGroup v%d: %d", version, beat)
		}
	}
}

// leaveCodes returns what is wrong with the error codes, or "". Before version 3 the top-level code has a member's
// error. From version 3 the member has an error code of its own.
func leaveCodes(version, code int16, members []int16, want int16) string {
	if version < 3 && code == want && len(members) == 0 {
		return ""
	}
	if version >= 3 && code == NoError && len(members) == 1 && members[0] == want {
		return ""
	}
	return fmt.Sprintf("code %d, members %v", code, members)
}

func connectAndSchemaRegistry(t *T, client Client) {
	opaqueAssignments(t, client, "connect", "sessioned")
	leaderOnly(t, client)
}

// opaqueAssignments lets a second worker join a first one. All metadata and assignments must arrive byte for byte.
func opaqueAssignments(t *T, client Client, protocolType, protocol string) {
	group := t.NewName("group")
	first, second := openMember(t, client, group), openMember(t, client, group)
	one := enter(t, first, "", protocolType, protocol, []byte("worker one"))
	if one.Leader != one.Member || one.Protocol != protocol {
		t.Failf("the only member got %+v", one)
	}
	syncGroup(t, first, one, protocolType, map[string][]byte{one.Member: {0xff, 0}})

	joined := make(chan JoinAnswer, 1)
	failed := make(chan error, 1)
	go func() {
		answer, err := second.Join("", protocolType, protocol, []byte("worker two"))
		if err == nil && answer.Code == MemberIDRequired {
			answer, err = second.Join(answer.Member, protocolType, protocol, []byte("worker two"))
		}
		if err != nil {
			failed <- err
			return
		}
		joined <- answer
	}()
	t.Wait("the first worker is told to join again", settleLimit, func() string {
		code, err := first.Heartbeat(one.Generation, one.Member)
		t.Must(err, "heartbeat")
		if code != RebalanceInProgress {
			return fmt.Sprintf("heartbeat: %d", code)
		}
		return ""
	})
	again := enter(t, first, one.Member, protocolType, protocol, []byte("worker one"))
	var two JoinAnswer
	select {
	case two = <-joined:
	case err := <-failed:
		t.Failf("join: %w", err)
	case <-t.Context.Done():
		t.Failf("the second worker's join was not answered")
	}
	if two.Code != NoError || two.Generation != again.Generation || two.Leader != again.Member || len(two.Members) != 0 {
		t.Failf("the second worker got %+v, the first one %+v", two, again)
	}
	if len(again.Members) != 2 || string(again.Members[two.Member]) != "worker two" {
		t.Failf("the leader sees %v", again.Members)
	}
	plan := map[string][]byte{again.Member: {0, 1, 2}, two.Member: bytes.Repeat([]byte{0xfe}, 1000)}
	answers := make(chan SyncAnswer, 1)
	go func() {
		answer, err := second.Sync(two.Generation, two.Member, protocolType, protocol, nil)
		if err != nil {
			failed <- err
			return
		}
		answers <- answer
	}()
	if got := syncGroup(t, first, again, protocolType, plan); !bytes.Equal(got, plan[again.Member]) {
		t.Failf("the leader got %x", got)
	}
	select {
	case answer := <-answers:
		if answer.Code != NoError || !bytes.Equal(answer.Assignment, plan[two.Member]) {
			t.Failf("the second worker got code %d and %d bytes", answer.Code, len(answer.Assignment))
		}
	case err := <-failed:
		t.Failf("sync: %w", err)
	case <-t.Context.Done():
		t.Failf("the second worker's sync was not answered")
	}
	described, err := client.DescribeGroup(t.Context, group)
	t.Must(err, "describe group")
	if described.State != "Stable" || described.ProtocolType != protocolType || len(described.Members) != 2 {
		t.Failf("described as %+v", described)
	}
}

// leaderOnly joins as Schema Registry does, which elects a leader and assigns nothing. Heartbeats must find no
// rebalance, and a repeated join must find the same member and leader.
func leaderOnly(t *T, client Client) {
	group := t.NewName("group")
	raw := openMember(t, client, group)
	join := enter(t, raw, "", "sr", "v0", []byte(`{"host":"registry"}`))
	if assignment := syncGroup(t, raw, join, "sr", nil); len(assignment) != 0 {
		t.Failf("an assignment of %d bytes where none was given", len(assignment))
	}
	for range 5 {
		code, err := raw.Heartbeat(join.Generation, join.Member)
		t.Must(err, "heartbeat")
		if code != NoError {
			t.Failf("heartbeat: %d", code)
		}
	}
	again := enter(t, raw, join.Member, "sr", "v0", []byte(`{"host":"registry"}`))
	if again.Member != join.Member || again.Leader != join.Leader {
		t.Failf("joining again: %+v became %+v", join, again)
	}
	described, err := client.DescribeGroup(t.Context, group)
	t.Must(err, "describe group")
	if described.ProtocolType != "sr" {
		t.Failf("described as %+v", described)
	}
}
