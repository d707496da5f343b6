package compat;

import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** A member in a process of its own, which can be killed or stopped. */
final class Child {
    private static final long STOP_SECONDS = 30;

    private final String name;
    private final Journal journal;
    private final Process process;

    Child(Clients clients, MemberOptions options, Journal journal) throws IOException {
        name = options.name();
        this.journal = journal;
        List<String> command = new ArrayList<>();
        command.add(System.getProperty("java.home") + File.separator + "bin" + File.separator + "java");
        command.addAll(List.of("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"));
        command.addAll(List.of("-cp", System.getProperty("java.class.path"), Main.class.getName()));
        ProcessBuilder builder = new ProcessBuilder(command);
        Map<String, String> environment = builder.environment();
        environment.put("COMPAT_BOOTSTRAP", clients.bootstrap);
        environment.put("COMPAT_MEMBER_NAME", options.name());
        environment.put("COMPAT_GROUP", options.group());
        environment.put("COMPAT_TOPIC", String.join(",", options.topics()));
        environment.put("COMPAT_ASSIGNOR", String.join(",", options.assignors()));
        environment.put("COMPAT_COMMIT", options.commit());
        environment.put("COMPAT_DELIVERIES_FILE", journal.path.toString());
        process = builder.redirectInput(ProcessBuilder.Redirect.from(new File("/dev/null")))
                .redirectOutput(ProcessBuilder.Redirect.DISCARD)
                .redirectError(ProcessBuilder.Redirect.INHERIT)
                .start();
    }

    /** Kill the process with SIGKILL. */
    void kill() throws InterruptedException {
        process.destroyForcibly().waitFor();
        journal.killed(name);
    }

    /** Stop the process with SIGSTOP. Its connections stay open, but the process does not answer on them. */
    void freeze() throws IOException, InterruptedException {
        signal("STOP");
        while (!state().startsWith("T")) {
            Thread.sleep(5);
        }
        journal.killed(name);
    }

    void thaw() throws IOException, InterruptedException {
        signal("CONT");
    }

    /** Send SIGTERM, and wait until the member has closed cleanly. */
    void finish() throws InterruptedException {
        process.destroy();
        if (!process.waitFor(STOP_SECONDS, TimeUnit.SECONDS) || process.exitValue() != 0) {
            throw new AssertionError(name + (process.isAlive() ? " does not end" : " ended with " + process.exitValue()));
        }
    }

    void end() {
        process.destroyForcibly();
    }

    private void signal(String signal) throws IOException, InterruptedException {
        if (new ProcessBuilder("kill", "-" + signal, Long.toString(process.pid())).start().waitFor() != 0) {
            throw new AssertionError("SIG" + signal + " could not be sent to " + name);
        }
    }

    private String state() throws IOException {
        Process ps = new ProcessBuilder("ps", "-o", "state=", "-p", Long.toString(process.pid())).start();
        return new String(ps.getInputStream().readAllBytes(), StandardCharsets.UTF_8).trim();
    }
}
