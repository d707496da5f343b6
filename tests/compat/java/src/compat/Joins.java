package compat;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import org.apache.kafka.common.TopicPartition;

/**
 * Measures how long a third consumer takes to join a group of two. For each group it prints one line: the milliseconds
 * from the consumer's start until each partition has exactly one owner again. The consumers commit by auto-commit, and
 * the client prefetches records.
 */
final class Joins {
    private static final int PARTITIONS = 6;
    private static final int ROUNDS = 100;
    private static final int WARM_UP = 1;

    private Joins() {}

    static int measure(Clients clients, int joins) throws Exception {
        String assignor = Main.environment("COMPAT_ASSIGNOR", "range");
        for (int join = 0; join < joins + WARM_UP; join++) {
            try (Run run = new Run("joins-" + join, clients)) {
                double milliseconds = join(run, assignor);
                if (join >= WARM_UP) {
                    System.out.printf(Locale.ROOT, "%.1f%n", milliseconds);
                }
            }
        }
        return 0;
    }

    private static double join(Run run, String assignor) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS);
        run.produce(topic, PARTITIONS, ROUNDS);
        List<Member> members = new ArrayList<>();
        List<String> names = new ArrayList<>();
        long began = 0;
        for (String name : List.of("a", "b", "c")) {
            names.add(name);
            began = System.nanoTime();
            members.add(run.start(new MemberOptions(name, group).topics(topic).assignors(assignor)));
            view.waitSettled(names, all);
        }
        double milliseconds = (System.nanoTime() - began) / 1e6;
        view.waitCaughtUp();
        GroupScenarios.finish(members);
        return milliseconds;
    }
}
