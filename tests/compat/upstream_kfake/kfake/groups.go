package kfake

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const pause = 50 * time.Millisecond

// GroupInfo is a broker's description of a group.
type GroupInfo struct {
	Group, State string
	Epoch        int32
	Members      []GroupMember
	Commits      map[string]map[int32]GroupCommit
}

// GroupMember is a member of a group. Assignment is by topic.
type GroupMember struct {
	MemberID             string
	InstanceID           *string
	ClientID, ClientHost string
	SubscribedTopics     []string
	Assignment           map[string][]int32
}

// GroupCommit is one committed offset.
type GroupCommit struct {
	Offset      int64
	LeaderEpoch int32
	Metadata    string
	At          time.Time
}

// NumAssigned returns the number of the member's partitions.
func (m *GroupMember) NumAssigned() int {
	var n int
	for _, partitions := range m.Assignment {
		n += len(partitions)
	}
	return n
}

// NumAssigned returns the number of partitions of all members.
func (g *GroupInfo) NumAssigned() int {
	var n int
	for i := range g.Members {
		n += g.Members[i].NumAssigned()
	}
	return n
}

// GroupInfo returns the description of a group, or nil if no such group exists.
func (c *Cluster) GroupInfo(group string) *GroupInfo {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return c.groupInfo(ctx, group)
}

func (c *Cluster) groupInfo(ctx context.Context, group string) *GroupInfo {
	info := c.consumerGroup(ctx, group)
	if info == nil {
		info = c.classicGroup(ctx, group)
	}
	if info == nil {
		return nil
	}
	slices.SortFunc(info.Members, func(a, b GroupMember) int { return cmp.Compare(a.MemberID, b.MemberID) })
	info.Commits = map[string]map[int32]GroupCommit{}
	offsets, err := c.admin.FetchOffsets(ctx, group)
	if err != nil {
		return info
	}
	offsets.Each(func(o kadm.OffsetResponse) {
		if o.Err == nil && o.At >= 0 {
			if info.Commits[o.Topic] == nil {
				info.Commits[o.Topic] = map[int32]GroupCommit{}
			}
			info.Commits[o.Topic][o.Partition] = GroupCommit{
				Offset: o.At, LeaderEpoch: o.LeaderEpoch, Metadata: o.Metadata,
			}
		}
	})
	return info
}

func (c *Cluster) consumerGroup(ctx context.Context, group string) *GroupInfo {
	described, err := c.admin.DescribeConsumerGroups(ctx, group)
	if err != nil || described[group].Err != nil {
		return nil
	}
	one := described[group]
	info := &GroupInfo{Group: group, State: one.State, Epoch: one.Epoch}
	for _, m := range one.Members {
		member := GroupMember{
			MemberID: m.MemberID, InstanceID: m.InstanceID, ClientID: m.ClientID, ClientHost: m.ClientHost,
			SubscribedTopics: m.SubscribedTopics, Assignment: map[string][]int32{},
		}
		for topic, partitions := range m.Assignment {
			for partition := range partitions {
				member.Assignment[topic] = append(member.Assignment[topic], partition)
			}
		}
		info.Members = append(info.Members, member)
	}
	return info
}

func (c *Cluster) classicGroup(ctx context.Context, group string) *GroupInfo {
	described, err := c.admin.DescribeGroups(ctx, group)
	if err != nil || described[group].Err != nil || described[group].State == "Dead" {
		return nil
	}
	one := described[group]
	info := &GroupInfo{Group: group, State: one.State, Epoch: -1}
	for _, m := range one.Members {
		member := GroupMember{
			MemberID: m.MemberID, InstanceID: m.InstanceID, ClientID: m.ClientID, ClientHost: m.ClientHost,
			Assignment: map[string][]int32{},
		}
		if joined, ok := m.Join.AsConsumer(); ok {
			member.SubscribedTopics = joined.Topics
		}
		if assigned, ok := m.Assigned.AsConsumer(); ok {
			eachTopic(assigned, func(topic string, partitions []int32) { member.Assignment[topic] = partitions })
		}
		info.Members = append(info.Members, member)
	}
	return info
}

func eachTopic(assigned *kmsg.ConsumerMemberAssignment, each func(string, []int32)) {
	for _, topic := range assigned.Topics {
		each(topic.Topic, topic.Partitions)
	}
}

// WaitGroupStable waits until a group is stable with this number of members, or with any number if `members` is -1.
func (c *Cluster) WaitGroupStable(ctx context.Context, group string, members int) (*GroupInfo, error) {
	for {
		info := c.groupInfo(ctx, group)
		if info != nil && info.State == "Stable" && (members < 0 || len(info.Members) == members) {
			return info, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %+v", ctx.Err(), info)
		case <-time.After(pause):
		}
	}
}
