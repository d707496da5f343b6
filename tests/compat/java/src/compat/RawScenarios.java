package compat;

import java.util.Arrays;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.Collectors;
import org.apache.kafka.common.message.HeartbeatRequestData;
import org.apache.kafka.common.message.HeartbeatResponseData;
import org.apache.kafka.common.message.JoinGroupRequestData;
import org.apache.kafka.common.message.JoinGroupRequestData.JoinGroupRequestProtocol;
import org.apache.kafka.common.message.JoinGroupRequestData.JoinGroupRequestProtocolCollection;
import org.apache.kafka.common.message.JoinGroupResponseData;
import org.apache.kafka.common.message.LeaveGroupRequestData;
import org.apache.kafka.common.message.LeaveGroupRequestData.MemberIdentity;
import org.apache.kafka.common.message.LeaveGroupResponseData;
import org.apache.kafka.common.message.SyncGroupRequestData;
import org.apache.kafka.common.message.SyncGroupRequestData.SyncGroupRequestAssignment;
import org.apache.kafka.common.message.SyncGroupResponseData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.Errors;

/**
 * Scenarios that need internal classes of the library: groups of other protocol types, and LeaveGroup at versions that
 * a consumer does not send.
 */
final class RawScenarios {
    private RawScenarios() {}

    static void register(Map<String, Body> scenarios) {
        scenarios.put("groups.leave-versions", RawScenarios::leaveVersions);
        scenarios.put("groups.connect-and-sr", RawScenarios::connectAndSchemaRegistry);
    }

    private static void connectAndSchemaRegistry(Run run) throws Exception {
        Map<String, byte[]> connect = new LinkedHashMap<>();
        connect.put("sessioned", new byte[] {0, 2, (byte) 0xff, 1});
        connect.put("compatible", new byte[] {0, 1, (byte) 0xfe});
        Map<String, byte[]> registry = Map.of("v0", DataScenarios.bytes("{\"host\":\"ünï\",\"master_eligibility\":true}"));
        ExecutorService threads = Executors.newFixedThreadPool(2);
        List<Callable<Void>> groups = List.of(
                () -> group(run, "connect", connect, "sessioned"), () -> group(run, "sr", registry, "v0"));
        List<Future<Void>> ended = threads.invokeAll(groups);
        threads.shutdown();
        ended.forEach(Clients::get);
    }

    /**
     * Run a group of two members, then of one. The gateway forwards metadata and assignments unchanged. While the
     * members stay the same, none of them has to join again.
     */
    private static Void group(Run run, String type, Map<String, byte[]> protocols, String chosen) throws Exception {
        String group = run.fresh(type);
        RawMember first = RawMember.start(run.clients, group, type, protocols, run.failures);
        RawMember second = RawMember.start(run.clients, group, type, protocols, run.failures);
        List<RawMember> members = List.of(first, second);
        try {
            Check.eventually(() -> together(run, members), type + ": both are in one generation");
            for (RawMember member : members) {
                RawMember.State state = member.joined();
                Check.equal(state.protocol(), chosen, type + ": the protocol");
                Check.that(
                        Arrays.equals(state.assignment(), RawMember.assignmentOf(state.memberId())),
                        type + ": the assignment is the leader's for this member");
            }
            Map<String, byte[]> seen = leaderOf(members).seen();
            Set<String> ids = members.stream().map(member -> member.joined().memberId()).collect(Collectors.toSet());
            Check.equal(seen.keySet(), ids, type + ": the members that the leader saw");
            seen.forEach((id, metadata) -> Check.that(
                    Arrays.equals(metadata, protocols.get(chosen)), type + ": the metadata that the leader saw"));
            int generation = first.joined().generation();
            int rounds = first.rounds() + second.rounds();
            // Wait longer than the session timeout, so that both members need their heartbeats to stay in the group.
            long until = System.nanoTime() + (Clients.SESSION_TIMEOUT_MS + 1000) * 1_000_000L;
            Check.eventually(() -> System.nanoTime() > until, "time passes");
            run.failures.check();
            Check.equal(first.rounds() + second.rounds(), rounds, type + ": rounds while nothing changes");
            Check.equal(second.joined().generation(), generation, type + ": the generation while nothing changes");
            second.finish();
            Check.eventually(
                    () -> first.joined() != null && first.joined().generation() == generation + 1,
                    type + ": the one that stays has a new generation",
                    GroupScenarios.SOON_SECONDS);
            Check.equal(first.joined().seen().size(), 1, type + ": the members that the leader sees then");
            first.finish();
            return null;
        } finally {
            members.forEach(RawMember::requestStop);
        }
    }

    private static boolean together(Run run, List<RawMember> members) {
        run.failures.check();
        Set<Integer> generations = new HashSet<>();
        for (RawMember member : members) {
            RawMember.State state = member.joined();
            if (state == null) {
                return false;
            }
            generations.add(state.generation());
        }
        return generations.size() == 1
                && members.stream().anyMatch(member -> member.joined().seen().size() == members.size());
    }

    private static RawMember.State leaderOf(List<RawMember> members) {
        return members.stream().map(RawMember::joined).filter(state -> !state.seen().isEmpty()).findFirst().orElseThrow();
    }

    /** Remove a member by its id at each version, and from version 3 on also a static member by its instance id. */
    private static void leaveVersions(Run run) throws Exception {
        int newest = ApiKeys.LEAVE_GROUP.latestVersion();
        for (int version = ApiKeys.LEAVE_GROUP.oldestVersion(); version <= newest; version++) {
            String where = "LeaveGroup " + version + ": ";
            String group = run.fresh("g");
            try (RawConnection connection = new RawConnection(run.clients.bootstrap)) {
                JoinGroupResponseData joined = join(connection, group, null);
                Check.equal(leave(connection, version, group, joined.memberId(), null), Errors.NONE, where + "a member");
                Check.equal(heartbeat(connection, group, joined), Errors.UNKNOWN_MEMBER_ID, where + "its heartbeat");
                Check.equal(
                        leave(connection, version, group, joined.memberId(), null),
                        Errors.UNKNOWN_MEMBER_ID,
                        where + "a member that has left");
                long started = System.nanoTime();
                JoinGroupResponseData next = join(connection, group, null);
                Check.that(System.nanoTime() - started < 3e9, where + "the next member had to wait");
                Check.equal(leave(connection, version, group, next.memberId(), null), Errors.NONE, where + "the next");
                if (version >= 3) {
                    join(connection, group, "i-1");
                    Check.equal(
                            leave(connection, version, group, "someone", "i-1"),
                            Errors.FENCED_INSTANCE_ID,
                            where + "a static name with another's id");
                    Check.equal(leave(connection, version, group, "", "i-1"), Errors.NONE, where + "a static name");
                    Check.equal(
                            leave(connection, version, group, "", "i-1"),
                            Errors.UNKNOWN_MEMBER_ID,
                            where + "a static name that has left");
                }
            }
        }
        run.detail = "versions " + ApiKeys.LEAVE_GROUP.oldestVersion() + " to " + newest;
    }

    private static JoinGroupResponseData join(RawConnection connection, String group, String instance)
            throws Exception {
        JoinGroupRequestProtocolCollection protocols = new JoinGroupRequestProtocolCollection();
        protocols.add(new JoinGroupRequestProtocol().setName("p").setMetadata(new byte[] {1}));
        JoinGroupRequestData request = new JoinGroupRequestData()
                .setGroupId(group)
                .setSessionTimeoutMs(Clients.SESSION_TIMEOUT_MS)
                .setRebalanceTimeoutMs(Clients.SESSION_TIMEOUT_MS)
                .setGroupInstanceId(instance)
                .setProtocolType("raw")
                .setProtocols(protocols);
        int version = ApiKeys.JOIN_GROUP.latestVersion();
        JoinGroupResponseData joined = connection.call(ApiKeys.JOIN_GROUP, version, request, JoinGroupResponseData::new);
        if (joined.errorCode() == Errors.MEMBER_ID_REQUIRED.code()) {
            request.setMemberId(joined.memberId());
            joined = connection.call(ApiKeys.JOIN_GROUP, version, request, JoinGroupResponseData::new);
        }
        Check.equal(Errors.forCode(joined.errorCode()), Errors.NONE, "JoinGroup");
        byte[] assignment = {7};
        SyncGroupRequestData sync = new SyncGroupRequestData()
                .setGroupId(group)
                .setGenerationId(joined.generationId())
                .setMemberId(joined.memberId())
                .setGroupInstanceId(instance)
                .setProtocolType("raw")
                .setProtocolName("p")
                .setAssignments(List.of(new SyncGroupRequestAssignment()
                        .setMemberId(joined.memberId())
                        .setAssignment(assignment)));
        SyncGroupResponseData synced = connection.call(
                ApiKeys.SYNC_GROUP, ApiKeys.SYNC_GROUP.latestVersion(), sync, SyncGroupResponseData::new);
        Check.equal(Errors.forCode(synced.errorCode()), Errors.NONE, "SyncGroup");
        Check.that(Arrays.equals(synced.assignment(), assignment), "the assignment");
        return joined;
    }

    private static Errors heartbeat(RawConnection connection, String group, JoinGroupResponseData joined)
            throws Exception {
        HeartbeatRequestData request = new HeartbeatRequestData()
                .setGroupId(group)
                .setGenerationId(joined.generationId())
                .setMemberId(joined.memberId());
        return Errors.forCode(connection.call(
                ApiKeys.HEARTBEAT, ApiKeys.HEARTBEAT.latestVersion(), request, HeartbeatResponseData::new).errorCode());
    }

    private static Errors leave(RawConnection connection, int version, String group, String member, String instance)
            throws Exception {
        LeaveGroupRequestData request = new LeaveGroupRequestData().setGroupId(group);
        if (version < 3) {
            request.setMemberId(member);
        } else {
            MemberIdentity identity = new MemberIdentity().setMemberId(member).setGroupInstanceId(instance);
            request.setMembers(List.of(version < 5 ? identity : identity.setReason("the end")));
        }
        LeaveGroupResponseData answer =
                connection.call(ApiKeys.LEAVE_GROUP, version, request, LeaveGroupResponseData::new);
        Errors error = Errors.forCode(answer.errorCode());
        if (version >= 3 && error == Errors.NONE) {
            Check.equal(answer.members().size(), 1, "LeaveGroup " + version + ": members of the answer");
            Check.equal(answer.members().get(0).groupInstanceId(), instance, "the name in the answer");
            error = Errors.forCode(answer.members().get(0).errorCode());
        }
        return error;
    }
}
