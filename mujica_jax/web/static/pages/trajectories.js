export const title = "trajectories";
export async function show(main) {}
