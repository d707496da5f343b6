package main

import (
	"errors"

	"compat"

	"github.com/IBM/sarama"
)

// rawMember uses Sarama's Broker, which sends one request at a time and waits for the response.
type rawMember struct {
	group  string
	client sarama.Client
	broker *sarama.Broker
}

const (
	sessionTimeoutMS   = 6_000
	rebalanceTimeoutMS = 10_000
)

func (c *client) Member(group string) (compat.RawMember, error) {
	opened, err := sarama.NewClient([]string{compat.Bootstrap()}, newConfig(c.version))
	if err != nil {
		return nil, err
	}
	broker, err := opened.Coordinator(group)
	if err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	return &rawMember{group, opened, broker}, nil
}

func (m *rawMember) Close() { _ = m.client.Close() }

func (m *rawMember) Join(member, protocolType, protocol string, metadata []byte) (compat.JoinAnswer, error) {
	request := sarama.NewJoinGroupRequest(m.client.Config().Version)
	request.GroupId, request.MemberId, request.ProtocolType = m.group, member, protocolType
	request.SessionTimeout, request.RebalanceTimeout = sessionTimeoutMS, rebalanceTimeoutMS
	request.AddGroupProtocol(protocol, metadata)
	response, err := m.broker.JoinGroup(request)
	if err != nil {
		return compat.JoinAnswer{}, err
	}
	answer := compat.JoinAnswer{
		Code: int16(response.Err), Generation: response.GenerationId, Member: response.MemberId,
		Leader: response.LeaderId, Protocol: response.GroupProtocol, Members: map[string][]byte{},
	}
	for _, joined := range response.Members {
		answer.Members[joined.MemberId] = joined.Metadata
	}
	return answer, nil
}

func (m *rawMember) Sync(
	generation int32, member, protocolType, protocol string, assignments map[string][]byte,
) (compat.SyncAnswer, error) {
	request := &sarama.SyncGroupRequest{
		Version: 5, GroupId: m.group, GenerationId: generation, MemberId: member,
		ProtocolType: &protocolType, ProtocolName: &protocol,
	}
	for id, assignment := range assignments {
		request.GroupAssignments = append(
			request.GroupAssignments, sarama.SyncGroupRequestAssignment{MemberId: id, Assignment: assignment},
		)
	}
	response, err := m.broker.SyncGroup(request)
	if err != nil {
		return compat.SyncAnswer{}, err
	}
	return compat.SyncAnswer{Code: int16(response.Err), Assignment: response.MemberAssignment}, nil
}

func (m *rawMember) Heartbeat(generation int32, member string) (int16, error) {
	response, err := m.broker.Heartbeat(&sarama.HeartbeatRequest{
		Version: 4, GroupId: m.group, GenerationId: generation, MemberId: member,
	})
	if err != nil {
		return 0, err
	}
	return int16(response.Err), nil
}

func (m *rawMember) Leave(version int16, members ...string) (int16, []int16, error) {
	request := &sarama.LeaveGroupRequest{Version: version, GroupId: m.group}
	if version < 3 {
		request.MemberId = members[0]
	} else {
		for _, member := range members {
			request.Members = append(request.Members, sarama.MemberIdentity{MemberId: member})
		}
	}
	response, err := m.broker.LeaveGroup(request)
	if err != nil {
		return 0, nil, err
	}
	var codes []int16
	for _, member := range response.Members {
		codes = append(codes, int16(member.Err))
	}
	return int16(response.Err), codes, nil
}
