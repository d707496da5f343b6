package compat;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.common.TopicPartition;

/** Scenarios of groups that rebalance incrementally, and of the rolling upgrade from an eager to such a group. */
final class CooperativeScenarios {
    private static final int PARTITIONS = 6;

    private CooperativeScenarios() {}

    static void register(Map<String, Body> scenarios) {
        scenarios.put("groups.cooperative", run -> cooperative(run, "cooperative-sticky"));
        scenarios.put("groups.rolling-upgrade", CooperativeScenarios::rollingUpgrade);
    }

    static void cooperative(Run run, String assignor) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        View view = run.journal(topic, PARTITIONS, true, false);
        Feed feed = run.feed(topic, PARTITIONS);
        List<Member> members = new ArrayList<>();
        List<String> names = new ArrayList<>();
        for (int count = 1; count <= 3; count++) {
            names.add("c" + count);
            members.add(run.start(new MemberOptions("c" + count, group).topics(topic).assignors(assignor)));
            view.waitSettled(names, Clients.allOf(topic, PARTITIONS));
            view.waitQuiet();
        }
        // 6 → 3+3 revokes three partitions, and 3+3 → 2+2+2 revokes two. Nothing else is revoked.
        Check.equal(view.revocations, 5, "revocations");
        feed.finish();
        view.waitCaughtUp();
        GroupScenarios.finish(members);
    }

    /**
     * Restart all members twice, one at a time, while records flow. Their assignors are first range, then both, and
     * then cooperative-sticky alone.
     */
    private static void rollingUpgrade(Run run) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS);
        Feed feed = run.feed(topic, PARTITIONS);
        Map<String, Member> members = new HashMap<>();
        for (String name : List.of("a0", "b0", "c0")) {
            members.put(name, run.start(new MemberOptions(name, group).topics(topic).assignors("range")));
        }
        view.waitSettled(members.keySet(), all);
        view.waitMore(2 * PARTITIONS);
        String[][] bounces = {{"cooperative-sticky", "range"}, {"cooperative-sticky"}};
        for (int bounce = 1; bounce <= bounces.length; bounce++) {
            for (String letter : List.of("a", "b", "c")) {
                String old = letter + (bounce - 1);
                members.remove(old).finish();
                String name = letter + bounce;
                members.put(
                        name,
                        run.start(new MemberOptions(name, group).topics(topic).assignors(bounces[bounce - 1])));
                view.waitSettled(members.keySet(), all);
                view.waitMore(2 * PARTITIONS);
                boolean last = letter.equals("c");
                String assignor = AdminScenarios.describeGroup(run.clients.admin(), group).partitionAssignor();
                Check.equal(
                        assignor,
                        bounce == 1 && !last ? "range" : "cooperative-sticky",
                        "the assignor after " + name + " has joined");
            }
        }
        view.waitQuiet();
        // If one more member joins a cooperative group, only the partitions that move to it are revoked.
        Map<String, Set<TopicPartition>> before = new HashMap<>();
        view.owned.forEach((name, owned) -> before.put(name, new HashSet<>(owned)));
        int revocations = view.revocations;
        members.put("d", run.start(new MemberOptions("d", group).topics(topic).assignors("cooperative-sticky")));
        view.waitSettled(members.keySet(), all);
        view.waitQuiet();
        Check.equal(view.revocations - revocations, view.owned.get("d").size(), "revocations for one more member");
        before.forEach((name, owned) ->
                Check.that(owned.containsAll(view.owned.get(name)), name + " got what it did not have"));
        feed.finish();
        view.waitCaughtUp();
        GroupScenarios.finish(new ArrayList<>(members.values()));
    }
}
