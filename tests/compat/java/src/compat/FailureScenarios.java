package compat;

import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.common.TopicPartition;

/** Scenarios in which members die, stop or poll too late, and scenarios in which the gateway restarts or is killed. */
final class FailureScenarios {
    private static final int PARTITIONS = GroupScenarios.PARTITIONS;
    private static final double EXPIRY_SECONDS = Clients.SESSION_TIMEOUT_MS / 1000.0 + 15;

    private FailureScenarios() {}

    static void register(Map<String, Body> scenarios) {
        scenarios.put("groups.crash", run -> crash(run));
        scenarios.put("groups.crash-half-open", run -> crashHalfOpen(run));
        scenarios.put("groups.max-poll-exceeded", FailureScenarios::maxPollExceeded);
        scenarios.put("groups.gateway-restart", run -> gatewayAway(run, "restart"));
        scenarios.put("groups.gateway-kill", run -> gatewayAway(run, "kill"));
    }

    /**
     * The survivor receives the killed member's partitions after the session timeout, and continues at the last commit.
     * At most one record is delivered twice.
     */
    static void crash(Run run, String... assignors) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        View view = run.journal(topic, PARTITIONS, false, true);
        Child victim = run.spawn(new MemberOptions("c2", group).topics(topic).assignors(assignors).commit("each"));
        Feed feed = run.feed(topic, PARTITIONS);
        Member survivor = run.start(new MemberOptions("c1", group).topics(topic).assignors(assignors));
        settleWithChild(view, topic);
        victim.kill();
        view.waitSettled(List.of("c1"), Clients.allOf(topic, PARTITIONS), EXPIRY_SECONDS);
        feed.finish();
        view.waitCaughtUp();
        survivor.finish();
        int again = view.deliveries - view.delivered.size();
        Check.that(again <= 1, again + " records came again, though each was committed before the next");
    }

    private static void settleWithChild(View view, String topic) throws InterruptedException {
        view.waitSettled(List.of("c1", "c2"), Clients.allOf(topic, PARTITIONS));
        int delivered = view.deliveredBy("c2");
        view.waitFor(() -> view.deliveredBy("c2") > delivered + 10, "the victim reads");
    }

    /** The stopped process keeps its connections. When it continues, the group has removed it, and it joins again. */
    static void crashHalfOpen(Run run, String... assignors) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS, false, true);
        Child victim = run.spawn(new MemberOptions("c2", group).topics(topic).assignors(assignors));
        Feed feed = run.feed(topic, PARTITIONS);
        Member survivor = run.start(new MemberOptions("c1", group).topics(topic).assignors(assignors));
        settleWithChild(view, topic);
        victim.freeze();
        view.waitSettled(List.of("c1"), all, EXPIRY_SECONDS);
        int assignments = view.assignments("c2");
        victim.thaw();
        view.waitFor(() -> view.assignments("c2") > assignments, "the victim has joined again");
        view.waitSettled(List.of("c1", "c2"), all);
        feed.finish();
        view.waitCaughtUp();
        victim.finish();
        survivor.finish();
    }

    /**
     * A member that does not poll for max.poll.interval.ms leaves the group, although it sends heartbeats. When it
     * polls again, it has lost all its partitions.
     */
    private static void maxPollExceeded(Run run) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS, false, true);
        Feed feed = run.feed(topic, PARTITIONS);
        MemberOptions options = new MemberOptions("busy", group).topics(topic).commit("each").maxPollInterval(5000);
        Member busy = run.start(options);
        Member other = run.start(new MemberOptions("other", group).topics(topic).commit("each"));
        view.waitSettled(List.of("busy", "other"), all);
        view.waitMore(2 * PARTITIONS);
        int assignments = view.assignments("busy");
        busy.stall();
        // The member owns nothing once it has left, but its client reports that only when the member polls again. So
        // the log says here already that its ownership has ended.
        run.journal().killed("busy");
        view.waitSettled(List.of("other"), all, 5 + GroupScenarios.SOON_SECONDS);
        busy.proceed();
        view.waitFor(() -> view.assignments("busy") > assignments, "the busy member has joined again");
        view.waitSettled(List.of("busy", "other"), all);
        feed.finish();
        view.waitCaughtUp();
        GroupScenarios.finish(List.of(busy, other));
    }

    static void gatewayAway(Run run, String action, String... assignors) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS, false, true);
        Feed feed = run.feed(topic, PARTITIONS, true);
        List<Member> members = List.of(
                run.start(new MemberOptions("c1", group).topics(topic).assignors(assignors)),
                run.start(new MemberOptions("c2", group).topics(topic).assignors(assignors)));
        view.waitSettled(List.of("c1", "c2"), all);
        view.waitMore(5 * PARTITIONS);
        run.gateway(action);
        view.refresh();
        int produced = view.produced.size();
        view.waitFor(() -> view.produced.size() > produced + PARTITIONS, "producing goes on");
        view.waitMore(5 * PARTITIONS);
        view.waitSettled(List.of("c1", "c2"), all);
        feed.finish();
        view.waitCaughtUp();
        GroupScenarios.finish(members);
    }
}
