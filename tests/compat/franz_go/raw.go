package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"compat"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// rawMember writes requests of kmsg to its own connection and reads the responses, without kgo. LeaveGroup has the
// version that the caller names. Every other request has the newest version of kmsg.
type rawMember struct {
	group       string
	conn        net.Conn
	format      *kmsg.RequestFormatter
	correlation int32
}

const (
	sessionTimeoutMS   = 6_000
	rebalanceTimeoutMS = 10_000
	maxAnswerBytes     = 1 << 20
)

func (c *client) Member(group string) (compat.RawMember, error) {
	conn, err := net.Dial("tcp", compat.Bootstrap())
	if err != nil {
		return nil, err
	}
	format := kmsg.NewRequestFormatter(kmsg.FormatterClientID("compat"))
	return &rawMember{group: group, conn: conn, format: format}, nil
}

func (m *rawMember) Close() { _ = m.conn.Close() }

// exchange sends one request and reads its response.
func (m *rawMember) exchange(request kmsg.Request) (kmsg.Response, error) {
	m.correlation++
	if _, err := m.conn.Write(m.format.AppendRequest(nil, request, m.correlation)); err != nil {
		return nil, err
	}
	var size [4]byte
	if _, err := io.ReadFull(m.conn, size[:]); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(size[:])
	if length < 5 || length > maxAnswerBytes {
		return nil, fmt.Errorf("an answer of %d bytes", length)
	}
	answer := make([]byte, length)
	if _, err := io.ReadFull(m.conn, answer); err != nil {
		return nil, err
	}
	if got := int32(binary.BigEndian.Uint32(answer)); got != m.correlation {
		return nil, fmt.Errorf("answer %d to request %d", got, m.correlation)
	}
	body := answer[4:]
	response := request.ResponseKind()
	if response.IsFlexible() {
		if body[0] != 0 {
			return nil, errors.New("tags in a response header")
		}
		body = body[1:]
	}
	return response, response.ReadFrom(body)
}

func (m *rawMember) Join(member, protocolType, protocol string, metadata []byte) (compat.JoinAnswer, error) {
	request := kmsg.NewPtrJoinGroupRequest()
	request.Version = request.MaxVersion()
	request.Group, request.MemberID, request.ProtocolType = m.group, member, protocolType
	request.SessionTimeoutMillis, request.RebalanceTimeoutMillis = sessionTimeoutMS, rebalanceTimeoutMS
	offered := kmsg.NewJoinGroupRequestProtocol()
	offered.Name, offered.Metadata = protocol, metadata
	request.Protocols = append(request.Protocols, offered)
	answered, err := m.exchange(request)
	if err != nil {
		return compat.JoinAnswer{}, err
	}
	response := answered.(*kmsg.JoinGroupResponse)
	answer := compat.JoinAnswer{
		Code: response.ErrorCode, Generation: response.Generation, Member: response.MemberID,
		Leader: response.LeaderID, Members: map[string][]byte{},
	}
	if response.Protocol != nil {
		answer.Protocol = *response.Protocol
	}
	for _, joined := range response.Members {
		answer.Members[joined.MemberID] = joined.ProtocolMetadata
	}
	return answer, nil
}

func (m *rawMember) Sync(
	generation int32, member, protocolType, protocol string, assignments map[string][]byte,
) (compat.SyncAnswer, error) {
	request := kmsg.NewPtrSyncGroupRequest()
	request.Version = request.MaxVersion()
	request.Group, request.Generation, request.MemberID = m.group, generation, member
	request.ProtocolType, request.Protocol = &protocolType, &protocol
	for id, assignment := range assignments {
		assigned := kmsg.NewSyncGroupRequestGroupAssignment()
		assigned.MemberID, assigned.MemberAssignment = id, assignment
		request.GroupAssignment = append(request.GroupAssignment, assigned)
	}
	answered, err := m.exchange(request)
	if err != nil {
		return compat.SyncAnswer{}, err
	}
	response := answered.(*kmsg.SyncGroupResponse)
	return compat.SyncAnswer{Code: response.ErrorCode, Assignment: response.MemberAssignment}, nil
}

func (m *rawMember) Heartbeat(generation int32, member string) (int16, error) {
	request := kmsg.NewPtrHeartbeatRequest()
	request.Version = request.MaxVersion()
	request.Group, request.Generation, request.MemberID = m.group, generation, member
	answered, err := m.exchange(request)
	if err != nil {
		return 0, err
	}
	return answered.(*kmsg.HeartbeatResponse).ErrorCode, nil
}

func (m *rawMember) Leave(version int16, members ...string) (int16, []int16, error) {
	request := kmsg.NewPtrLeaveGroupRequest()
	request.Version, request.Group = version, m.group
	if version < 3 {
		request.MemberID = members[0]
	} else {
		for _, member := range members {
			leaving := kmsg.NewLeaveGroupRequestMember()
			leaving.MemberID = member
			request.Members = append(request.Members, leaving)
		}
	}
	answered, err := m.exchange(request)
	if err != nil {
		return 0, nil, err
	}
	response := answered.(*kmsg.LeaveGroupResponse)
	var codes []int16
	for _, member := range response.Members {
		codes = append(codes, member.ErrorCode)
	}
	return response.ErrorCode, codes, nil
}
