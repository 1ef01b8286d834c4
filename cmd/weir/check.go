package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func checkCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Check every invariant of the installed log",
		Long: `Runs every invariant query of Weir against the live database, in one snapshot, and prints what is violated. It only reads,
but needs the privileges of the role that installed Weir. The exit code is 1 when an invariant is violated.`,
		Example: "  weir check\n  weir check --quiet                      # violations only\n  weir check --output json | jq 'select(.violations != [])'",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			results, err := client.Check(cmd.Context())
			if err != nil {
				return err
			}
			broken := 0
			for _, r := range results {
				if len(r.Violations) > 0 {
					broken++
				}
				err := g.print(r, func() error {
					switch {
					case len(r.Violations) > 0:
						fmt.Fprintf(g.out, "%s  %s: %s\n", paint(g.colorOut, red, "VIOLATED"), r.Name, r.Holds)
					case !g.quiet:
						fmt.Fprintf(g.out, "holds     %s: %s\n", r.Name, r.Holds)
					}
					for _, v := range r.Violations {
						fmt.Fprintf(g.out, "          %s\n", visible(v))
					}
					return nil // out keeps its first error
				})
				if err != nil {
					return err
				}
			}
			if broken > 0 {
				if err := g.out.Flush(); err != nil {
					return err
				}
				return fmt.Errorf("%d of %d invariants are violated: stop the consumers of the topics concerned and find out why before they go on", broken, len(results))
			}
			if g.json() {
				return nil
			}
			return g.done(nil, "all %d invariants hold", len(results))
		},
	}
}
